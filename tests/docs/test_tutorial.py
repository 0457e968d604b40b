"""The tutorial, followed to the letter: its script and its DAG, in a new Airflow home."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_first_dag(tmp_path: Path) -> None:
    page = (ROOT / "docs/tutorial/first-dag.md").read_text()
    (tmp_path / "training").mkdir()
    shutil.copy(ROOT / "docs/examples/train_digits.py", tmp_path / "training")
    dag = re.search(r"<!-- run: dag -->\n```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert dag
    (tmp_path / "first_dag.py").write_text(dag[1])
    shell = re.search(r"```bash\n(export AIRFLOW_HOME.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert shell
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "ELASTICFLOW", "PYTEST"))},
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "ELASTICFLOW_IDLE_EXIT_S": "5",
        "ELASTICFLOW_SLOT_LOCK_DIR": str(tmp_path / "slots"),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", shell[1]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    output = done.stdout + done.stderr
    assert re.search(r"loss 0\.\d+, \d+ s before the deadline", output), output[-8000:]

"""The page about sizing a cluster, followed to the letter; the answer that it shows is the answer that comes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/size-a-cluster.md"


@pytest.mark.slow
def test_the_answer_on_the_page_is_the_answer(tmp_path: Path) -> None:
    text = PAGE.read_text()
    for name, body in re.findall(r"^<!-- save: (\S+) -->\n```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(body)
    commands = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(commands) == 3
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands[:2])],  # the third asks a service
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = re.search(r"^smallest cluster.*?(?=^```)", text, re.DOTALL | re.MULTILINE)
    assert shown
    assert shown[0] in done.stdout
    assert (tmp_path / "rough/jobs.csv").exists()

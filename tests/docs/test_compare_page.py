"""The pages about simulating and comparing, followed to the letter, but for the installation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "how-to/compare-policies-on-your-own-trace.md"
REFERENCE = DOCS / "reference/simulate.md"
BIN = Path(sys.executable).parent


@pytest.mark.slow
def test_every_snippet_of_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra [simulate]")
    pytest.importorskip("scipy", reason="needs the extra [simulate]")
    text = PAGE.read_text()
    for name, body in re.findall(r"^<!-- save: (\S+) -->\n```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(body)
    both = text + REFERENCE.read_text()
    commands = [c for c in re.findall(r"^```bash\n(.*?)^```", both, re.DOTALL | re.MULTILINE) if "pip install" not in c]
    assert len(commands) == 7
    # With fewer policies than all: what each of them does is tested where it lives.
    script = "\n".join(commands).replace("--out comparison", "--out comparison --policies elasticflow,edf,gang-fifo")
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "columns that are not known are ignored: team" in done.stderr
    assert "smallest cluster" in done.stdout
    assert (tmp_path / "comparison/deadlines.png").stat().st_size > 0
    assert (tmp_path / "closely/schedule-tiresias.jsonl").stat().st_size > 0
    assert (tmp_path / "sweep/capacity.csv").stat().st_size > 0

    converted = subprocess.run(
        [sys.executable, "from_slurm.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    (tmp_path / "slurm.csv").write_text(converted)
    simulated = "elasticflow simulate --trace slurm.csv --curves curves --nodes 1 --slots-per-node 8"
    subprocess.run(simulated.split(), cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)

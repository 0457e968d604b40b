"""The example and the pages about training scripts are true."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime.protocol import Promotion
from elasticflow_airflow.runtime.session import Session

DOCS = Path(__file__).resolve().parents[2] / "docs"
HOW_TO = (DOCS / "how-to/elastic-training-script.md").read_text()
REFERENCE = (DOCS / "reference/runtime.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", HOW_TO, re.DOTALL | re.MULTILINE)


def snippet(needle: str) -> str:
    (found,) = [text for text in SNIPPETS if needle in text]
    return found


@pytest.mark.slow
def test_the_example_runs_alone(session_globals, tmp_path, capsys):
    """As a person runs it, in a folder of its own; a second start finds that all is done."""
    script = str(DOCS / "examples/train_digits.py")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=True
    )
    assert "elasticflow: started step=0 micro_batch_size=4 logical_workers=8" in done.stdout
    accuracy = re.search(r"elasticflow: finished step=114 metrics={'accuracy': ([\d.]+)}", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9
    promotion = Promotion.read(tmp_path / "elasticflow-checkpoints")
    assert promotion is not None
    assert promotion.step == 114
    runpy.run_path(script, run_name="__main__")
    assert "resumed_from=g000000/step-000000000114" in capsys.readouterr().out


def test_the_loop_before_and_after(session_globals):
    scope: dict = {}
    torch.manual_seed(0)
    exec(snippet("for epoch in range(3)"), scope)
    plain = float(scope["loss"].detach())
    torch.manual_seed(0)
    exec(snippet("runtime.init(epochs=3)"), scope := {})
    assert scope["session"].steps_done == 21
    assert scope["step"].loss == pytest.approx(plain, abs=0.5)
    changed = [line for line in snippet("runtime.init(epochs=3)").splitlines() if re.search(r"# \d+$", line)]
    assert len(changed) == 10


def test_the_plain_script_stops_resumes_and_shows_its_progress(session_globals, tmp_path, monkeypatch, capsys):
    script = compile(snippet("signal.signal(signal.SIGTERM"), "plain.py", "exec")
    pattern = re.search(r'progress_regex=r"(.*)"', HOW_TO)
    assert pattern is not None
    monkeypatch.setattr(sys, "argv", ["plain.py", str(tmp_path / "saved")])
    randn, drawn = torch.randn, []

    def stop_at_the_twentieth(*size):
        drawn.append(size)
        if len(drawn) == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return randn(*size)

    monkeypatch.setattr(torch, "randn", stop_at_the_twentieth)
    exec(script, {})
    exec(script, {})
    lines = capsys.readouterr().out.splitlines()
    steps = [int(re.search(pattern[1], line)["step"]) for line in lines]
    assert steps == list(range(1, 61))
    assert all(float(re.search(pattern[1], line)["loss"]) >= 0 for line in lines)


def test_the_reference_names_all_that_is_public():
    for name in inspect.signature(runtime.init).parameters:
        assert f"`{name}`" in REFERENCE, name
    for name in (n for n in dir(Session) if not n.startswith("_")):
        assert re.search(rf"`{name}[`(]", REFERENCE), name
    for name in runtime.__all__:
        assert name in REFERENCE, name


def test_the_smallest_script_of_the_reference_trains(session_globals):
    (smallest,) = re.findall(r"^```python\n(.*?)^```", REFERENCE, re.DOTALL | re.MULTILINE)
    exec(smallest, scope := {})
    assert scope["session"].steps_done == 8
    assert Promotion.read(Path("elasticflow-checkpoints")).step == 8

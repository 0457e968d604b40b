"""The check that finds out whether a script trains the same weights with any number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.gang import install

from elasticflow_airflow.runtime import consistency_check

SCRIPT = Path(__file__).parents[1] / "support" / "train_small.py"


@pytest.mark.slow
def test_it_tells_the_same_from_not_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TEST_STEP_S", "0")
    arguments = ["--global-batch-size", "16", "--steps", "7"]
    assert consistency_check.main([str(SCRIPT), *arguments, "--workers", "1,2"]) == 0
    assert "the same, bit for bit, with 1, 2 workers" in capsys.readouterr().out
    rank_dependent = install(SCRIPT, tmp_path)
    text = rank_dependent.read_text()
    rank_dependent.write_text(text.replace("step.backward(loss)", "step.backward(loss * (1 + session.rank))"))
    assert consistency_check.main([str(rank_dependent), *arguments]) == 1
    out = capsys.readouterr().out
    assert "NOT THE SAME" in out
    assert "between 1 and 2 workers: 0.weight" in out
    failing = tmp_path / "fails.py"
    failing.write_text("raise ValueError('no data today')")
    assert consistency_check.main([str(failing), *arguments]) == 2
    assert "no data today" in capsys.readouterr().err


def test_a_script_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        consistency_check.main(["nothing.py", "--global-batch-size", "4"])
    assert "there is no script nothing.py" in capsys.readouterr().err

"""Two optimizers that take turns, as in a GAN: the same bits whatever happens, with both states in each checkpoint."""

from __future__ import annotations

import functools
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gang import Gang
from torch import nn

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime import consistency_check
from elasticflow_airflow.runtime.checkpoints.checkpoint import TRAINING, _read, read_weights
from elasticflow_airflow.runtime.session import Session
from elasticflow_airflow.runtime.stores.manifest import list_candidates, verify_candidate

EXAMPLE = Path(__file__).parents[2] / "docs/examples/train_gan.py"
STEPS = 12


@pytest.fixture
def train(session_globals: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, torch.Tensor]]:
    """Train a few steps of the example; returns the weights that the last checkpoint holds."""
    init, opened = runtime.init, Session.step

    def run(folder: str, terminate_in: int | None = None) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(runtime, "init", lambda **_: init(steps=STEPS, checkpoint_dir=folder))

        def step(session: Session) -> Any:
            found = opened(session)
            if session.steps_done == terminate_in:
                os.kill(os.getpid(), signal.SIGTERM)
            return found

        monkeypatch.setattr(Session, "step", step)
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return dict(read_weights(list_candidates(Path(folder).absolute())[-1]))

    return run


@pytest.mark.parametrize("step", [0, 1, 6, 7])
def test_a_stop_between_the_two_is_none(train, step):
    expected = train("undisturbed")
    with pytest.raises(SystemExit) as left:
        train("stopped", terminate_in=step)
    assert left.value.code == 0
    (saved,) = list_candidates(Path("stopped").absolute())
    assert saved.name.endswith(f"{step + 1:012d}")
    found = train("stopped")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    states = _read(list_candidates(Path("stopped").absolute())[-1], TRAINING)
    for name in ("optimizer", "generator_optimizer"):
        assert {int(state["step"]) for state in states[name]["state"].values()} == {STEPS // 2}


def test_several_optimizers_have_a_name_each(session_globals):
    session, model = runtime.init(epochs=1), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(TypeError, match=r"optimizer= is a list: register each by a name of its own.*second_optimizer="):
        session.register(model, optimizers)
    with pytest.raises(TypeError, match="second_optimizer= is a list"):
        session.register(model, optimizers[0], second_optimizer=optimizers)
    with pytest.raises(TypeError, match="LBFGS computes the loss several times"):
        session.register(model, optimizers[0], second_optimizer=torch.optim.LBFGS(model.parameters()))
    session.register(model, optimizers[0], second_optimizer=optimizers[1])


@pytest.mark.slow
def test_the_example_learns_and_trains_the_same_with_any_number_of_workers(tmp_path, capsys):
    done = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = re.search(r"finished step=2560 metrics={'near_a_mode': ([\d.]+)}", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 0.6
    arguments = ["--global-batch-size", "64", "--steps", "21", "--workers", "1,2,4"]
    assert consistency_check.main([str(EXAMPLE), *arguments]) == 0
    assert "the same, bit for bit, with 1, 2, 4 workers" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.parametrize("parity", [0, 1])
def test_workers_come_and_die_in_the_turn_of_either(tmp_path, parity):
    def weights(run: Gang) -> dict[str, torch.Tensor]:
        last = list_candidates(run.folder / "checkpoints")[-1]
        assert last.name.endswith(f"{steps:012d}"), run.story()
        return dict(read_weights(verify_candidate(last).path))

    steps = 3000
    make = functools.partial(Gang, script=EXAMPLE, steps=steps, global_batch_size=64, logical_workers=8)
    with make(tmp_path / "undisturbed") as one:
        one.plan("alone")
        assert one.finish() == {"alone": 0}, one.story()
        expected = weights(one)
    with make(tmp_path / "changes") as run:
        run.plan("a")
        run.wait(lambda: run.step() > 20 and run.step() % 2 == parity, "progress")
        run.plan("a", "b")
        run.wait_until_begun()
        began = run.step()
        run.wait(lambda: run.step() > began + 20 + parity, "progress together")
        run.kill("a")
        run.plan("b", lost=["a"])
        assert run.finish() == {"a": -9, "b": 0}, run.story()
        found = weights(run)
    assert all(torch.equal(found[name], expected[name]) for name in expected)

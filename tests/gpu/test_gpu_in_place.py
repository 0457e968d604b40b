"""Workers come, go and die on one GPU while it trains, and the weights stay the same, bit for bit."""

from __future__ import annotations

import pytest

from elasticflow_airflow.runtime.protocol import ReportKind

pytestmark = pytest.mark.gpu

STEP_S = 0.05


def test_grow_and_shrink_while_it_trains(gpu_gang, train, weights_of) -> None:
    gang = gpu_gang(step_s=STEP_S, epochs=40)
    gang.plan("a")
    gang.wait(lambda: gang.step() > 5, "step 5")
    gang.plan("a", "b")
    gang.wait_until_begun()
    at = gang.step()
    gang.wait(lambda: gang.step() > at + 5, "steps of two workers")
    gang.plan("a")
    gang.wait_until_begun()
    gang.hurry()
    assert set(gang.finish().values()) == {0}, gang.story()
    assert weights_of(gang) == train(1, epochs=40)
    pauses = [r.data["pause_s"] for r in gang.reports(ReportKind.STARTED) if r.data.get("pause_s") is not None]
    assert pauses, gang.story()


def test_a_worker_is_killed_and_the_other_goes_on_from_memory(gpu_gang, train, weights_of) -> None:
    gang = gpu_gang(step_s=STEP_S, epochs=40)
    gang.plan("a", "b")
    gang.wait(lambda: gang.step() > 5, "step 5")
    gang.kill("b")
    gang.processes["b"].wait()
    gang.plan("a", lost=["b"])
    gang.wait_until_begun()
    (started,) = gang.reports(ReportKind.STARTED, gang.generation)
    assert started.data["recovered"]
    gang.hurry()
    codes = gang.finish()
    assert codes["a"] == 0, gang.story()
    assert weights_of(gang) == train(1, epochs=40)

"""Whatever goes wrong, whoever was not refused ends: no job is forgotten while slots stand idle."""

from __future__ import annotations

import pytest
from support.cases import slow

from elasticflow_airflow.scheduler_core.model.values import ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.disturbances import Troubles
from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, Setting, play
from elasticflow_airflow.scheduler_core.simulator.inputs import synthetic
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import Trace
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster

CURVES = {
    ("net", 64): ScalingCurve({1: 2.0, 2: 3.6, 4: 6.0, 8: 9.0}),
    ("wide", 64): ScalingCurve({2: 3.0, 4: 5.6, 8: 10.0, 16: 17.0}),
}


def unfinished(seed: int, pause_s: float) -> list[str]:
    """Jobs neither refused nor ended, with slow slots that nobody names, failures, maintenance and wrong curves."""
    setting = Setting(
        trace=Trace(None, tuple(synthetic.poisson(CURVES, jobs=12, every_s=300.0, seed=seed))),
        curves=CURVES,
        nodes=cluster(3, 8),
        conditions=Conditions(pause_s=pause_s, seed=seed, throughput_error=0.3 if seed % 4 == 0 else 0.0),
        troubles=Troubles(
            seed=seed,
            mtbf_h=2.0 if seed % 2 else None,
            drain_every_h=3.0 if seed % 3 else None,
            straggler_every_h=2.0,
        ),
    )
    result = play(setting, Contender(policy="elasticflow")).result
    return [r.job_id for r in result.records if r.finished_s is None and r.rejected_s is None]


@pytest.mark.parametrize("seed", [*range(36, 40), *slow(*range(40, 48), 57, 66, 81, 101)])
def test_nobody_is_left_behind_where_a_change_costs_nothing(seed: int) -> None:
    assert unfinished(seed, 0.0) == []


@pytest.mark.parametrize("seed", [0, 1, *slow(*range(2, 6))])
def test_nor_where_it_costs_a_pause(seed: int) -> None:
    assert unfinished(seed, 10.0) == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 700))
def test_nobody_is_left_behind_at_length(seed: int) -> None:
    assert unfinished(seed, 0.0 if seed % 5 else 1.0) == []

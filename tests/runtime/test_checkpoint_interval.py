"""How often to save, from what it costs and how often workers fail."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow_airflow.runtime.checkpoints.interval import LEAST_S, MOST_S, SaveInterval, best_interval_s


def test_near_young_where_saves_are_cheap():
    assert best_interval_s(1.0, 86_400.0) == pytest.approx(math.sqrt(2 * 86_400.0), rel=0.01)


def test_no_more_often_than_failures_come():
    assert best_interval_s(500.0, 200.0) == 200.0


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 5.0), (float("nan"), 1.0)])
def test_what_is_not_positive_is_refused(cost_s, mtbf_s):
    with pytest.raises(ValueError, match="both must be positive"):
        best_interval_s(cost_s, mtbf_s)


def lost_s(interval_s: float, cost_s: float, mtbf_s: float, seed: int) -> float:
    """Simulated: time beyond the training itself, of 3,000 failures' worth of training."""
    chaos = random.Random(seed)
    todo_s, clock_s, failure_s = 3000 * mtbf_s, 0.0, chaos.expovariate(1 / mtbf_s)
    work_s = todo_s
    while todo_s > 0:
        step_s = min(interval_s, todo_s)
        if failure_s < step_s + cost_s:
            clock_s += failure_s
            failure_s = chaos.expovariate(1 / mtbf_s)
            continue
        failure_s -= step_s + cost_s
        clock_s += step_s + cost_s
        todo_s -= step_s
    return clock_s - work_s


@pytest.mark.parametrize("cost_s", [0.01, 0.1])
def test_it_loses_less_than_intervals_much_shorter_or_longer(cost_s):
    best_s = best_interval_s(cost_s, 1.0)
    losses = [lost_s(best_s * factor, cost_s, 1.0, seed=3) for factor in (0.4, 1.0, 2.5)]
    assert losses[1] == min(losses)


@given(
    stall_s=st.floats(0, 1e3),
    write_s=st.floats(0, 1e4),
    failures=st.integers(0, 100),
    trained_s=st.floats(0, 1e7),
)
def test_between_its_bounds_whatever_is_measured(stall_s, write_s, failures, trained_s):
    interval = SaveInterval(failures=failures, trained_s=trained_s)
    assert interval.seconds == interval.first_s
    interval.saved(stall_s=stall_s, write_s=write_s)
    assert LEAST_S <= interval.seconds <= MOST_S
    assert interval.seconds >= min(MOST_S, 2 * write_s)  # never faster than the disk


@pytest.mark.parametrize(("size_bytes", "first_s"), [(0, 10.0), (44e6, 10.0), (1.3e9, 26.0), (100e9, 60.0)])
def test_the_first_comes_soon_where_the_state_is_small(size_bytes, first_s):
    interval = SaveInterval()
    interval.expect(int(size_bytes))
    assert interval.seconds == first_s


def test_more_failures_more_saves_and_dearer_saves_fewer():
    def seconds(failures: int, stall_s: float) -> float:
        interval = SaveInterval(failures=failures, trained_s=3600.0)
        interval.saved(stall_s=stall_s, write_s=0.0)
        return interval.seconds

    assert seconds(0, 1.0) > seconds(3, 1.0) > seconds(30, 1.0)
    assert seconds(3, 1.0) < seconds(3, 10.0)

"""Who is slow: robust against noise, against a slow majority, and only after a while."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow_airflow.scheduler_core.jobs.stragglers import Straggler, StragglerRule, add_window, find_stragglers

RULE = StragglerRule(windows=3)


def ids(number: int) -> list[str]:
    return [f"w{index}" for index in range(number)]


def steady(number: int, *, seed: int = 0, noise: float = 0.03) -> dict[str, list[float]]:
    draw = random.Random(seed)
    return {worker: [0.1 * (1 + draw.gauss(0, noise)) for _ in range(3)] for worker in ids(number)}


@pytest.mark.parametrize("number", [2, 4, 8, 64])
def test_one_slow_worker_is_found_in_any_gang(number: int) -> None:
    windows = steady(number)
    windows["w1"] = [0.2, 0.21, 0.19]
    (found,) = find_stragglers(windows, ids(number), RULE)
    assert found.worker_id == "w1"
    assert found.slowdown == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("number", [2, 4, 8, 64])
def test_equal_workers_have_none(number: int) -> None:
    assert not any(find_stragglers(steady(number, seed=seed, noise=0.05), ids(number), RULE) for seed in range(100))


def test_a_hiccup_is_no_straggler() -> None:
    windows = steady(4)
    windows["w2"] = [0.1, 1.0, 0.1]
    assert find_stragglers(windows, ids(4), RULE) == ()


def test_the_slowest_comes_first_and_half_of_them_are_not_stragglers() -> None:
    windows = steady(8)
    windows["w3"], windows["w5"] = [0.2] * 3, [0.3] * 3
    assert [found.worker_id for found in find_stragglers(windows, ids(8), RULE)] == ["w5", "w3"]
    for worker in ("w0", "w1"):
        windows[worker] = [0.25] * 3
    assert find_stragglers(windows, ids(8), RULE) == ()


def test_who_is_new_or_gone_does_not_count() -> None:
    windows = steady(4)
    windows["w1"] = [0.5] * 3
    assert find_stragglers(windows, [*ids(4), "new"], RULE) == ()
    assert find_stragglers(windows, ["w0", "w2", "w3"], RULE) == ()
    assert find_stragglers(windows, ["w1"], RULE) == ()


def test_windows_are_per_step_and_no_longer_than_needed() -> None:
    windows: dict[str, list[float]] = {}
    for number in range(5):
        windows = add_window(windows, "w0", compute_s=float(number + 1), steps=10, rule=RULE)
    assert windows == {"w0": pytest.approx([0.3, 0.4, 0.5])}
    for compute_s, steps in ((1.0, 0), (float("nan"), 1), (0.0, 3), (float("inf"), 2)):
        assert add_window(windows, "w0", compute_s, steps, RULE) == windows


@given(
    st.integers(2, 9).flatmap(
        lambda number: st.lists(
            st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3), min_size=number, max_size=number
        )
    ),
    st.integers(-10, 10),
)
def test_neither_the_unit_nor_the_order_matters(times: list[list[float]], power: int) -> None:
    names = ids(len(times))
    windows = dict(zip(names, times, strict=True))
    found = find_stragglers(windows, names, RULE)
    assert len(found) <= max(1, (len(names) - 1) // 2)
    assert all(one.slowdown > 1 + RULE.least_excess for one in found)
    assert find_stragglers(windows, names[::-1], RULE) == found
    scaled = {name: [value * 2.0**power for value in values] for name, values in windows.items()}
    assert find_stragglers(scaled, names, RULE) == found


@pytest.mark.parametrize("wrong", [{"windows": 0}, {"deviations": -1.0}, {"least_excess": 0.0}])
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="window"):
        StragglerRule(**wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_a_straggler_is_a_value() -> None:
    assert Straggler("w0", 2.0) == Straggler("w0", 2.0)

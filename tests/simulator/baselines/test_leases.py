"""Leases: schedules that give everybody enough terms in time, term by term."""

from __future__ import annotations

import random

import numpy as np
import pytest

from elasticflow_airflow.scheduler_core.simulator.baselines.common.leases import (
    Demand,
    Rows,
    Schedule,
    beside,
    by_deadline,
    greedy,
    keeping,
    schedule_for,
    solve,
)


def slots(count: int, terms: int) -> Rows:
    """``count`` slots (a power of two, in one block) in each of ``terms`` terms."""
    return np.full((count.bit_length(), terms), count, dtype=np.int32)


def check(schedule: Schedule, demands: list[Demand], rows: Rows) -> None:
    used = np.zeros_like(rows)
    for demand in demands:
        terms = schedule[demand.job_id]
        assert len(set(terms)) == len(terms) >= demand.leases
        assert all(0 <= term < demand.terms for term in terms)
        used[: demand.level + 1, list(terms)] += demand.size
    assert (used <= rows).all()


def test_the_earliest_deadline_is_filled_first_as_early_as_it_can() -> None:
    demands = [Demand("late", 2, 2, 4), Demand("soon", 1, 2, 2)]
    rows = slots(2, 4)
    found = greedy(by_deadline(demands), rows)
    assert found == {"soon": (0, 1), "late": (2, 3)}
    check(found, demands, rows)


def test_too_few_terms_or_slots_are_no_schedule() -> None:
    assert schedule_for([Demand("a", 1, 3, 2)], slots(1, 4)) is None
    assert greedy([Demand("a", 1, 2, 3), Demand("b", 1, 2, 3)], slots(1, 3)) is None
    assert greedy([Demand("a", 4, 1, 3)], slots(2, 3)) is None


def test_a_newcomer_fits_beside_a_schedule_or_not_at_all() -> None:
    demands, rows = [Demand("a", 1, 2, 3)], slots(2, 3)
    assert beside({"a": (0, 1)}, demands, Demand("b", 2, 1, 3), rows) == {"a": (0, 1), "b": (2,)}
    assert beside({"a": (0, 2)}, demands, Demand("b", 2, 2, 3), rows) is None
    assert beside({"a": (0,)}, demands, Demand("b", 1, 1, 3), rows) is None  # what is stored does not suffice


def test_running_jobs_keep_their_leases_unless_somebody_must_have_them() -> None:
    rows = slots(1, 4)
    calm = [Demand("runs", 1, 1, 4), Demand("waits", 1, 1, 2)]
    found = keeping(calm, rows, ["runs"])
    assert found is not None
    assert found["runs"] == (0,)
    tight = [Demand("runs", 1, 1, 4), Demand("must", 1, 2, 2)]
    found = keeping(tight, rows, ["runs"])
    assert found is not None
    assert found["must"] == (0, 1)
    check(found, tight, rows)


def test_the_solver_s_sums_are_laid_out_term_by_term() -> None:
    pytest.importorskip("scipy")
    rows = slots(2, 2)
    # By sums these fit (1 * 2 + 2 * 1 slot-terms into 4); but the pair needs a whole term, the other both.
    assert solve([Demand("pair", 2, 1, 2), Demand("both", 1, 2, 2)], rows) is None
    fits = [Demand("pair", 2, 1, 2), Demand("one", 1, 1, 2), Demand("other", 1, 1, 2)]
    found = solve(fits, rows)
    assert found is not None
    check(found, fits, rows)


@pytest.mark.parametrize("seed", range(12))
def test_every_schedule_keeps_to_the_slots_and_terms(seed: int) -> None:
    pytest.importorskip("scipy")
    chaos = random.Random(seed)
    rows = slots(8, 12)
    rows[:, 4:6] //= 2  # a pinned gang holds half of them for a while
    rows[3, 4:6] = 0
    demands = []
    for number in range(8):
        terms = chaos.randint(1, 12)
        demands.append(Demand(f"j{number}", 1 << chaos.randint(0, 2), chaos.randint(1, terms), terms))
    for found in (greedy(by_deadline(demands), rows), solve(demands, rows), keeping(demands, rows, ["j0", "j3"])):
        if found is not None:
            check(found, demands, rows)

"""How many logical workers a job has, and what is said where that cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow_airflow.runtime.logical_workers import choose_logical_workers, is_power_of_two, owned_by


@pytest.mark.parametrize(
    ("asked", "batch", "workers", "message"),
    [
        (None, 32, 3, "3 workers: in consistent mode their number must be a power of two"),
        (None, 6, 4, r"global_batch_size=6 cannot be shared equally by 4 workers: choose a multiple of 4, fewer work"),
        (None, 32, 16, r"16 workers, and there are 8 logical workers where nobody says how many.* max_workers=16"),
        (6, 36, 1, "logical_workers=6: it must be a power of two"),
        (0, 36, 1, "logical_workers=0: it must be a power of two"),
        (8, 12, 1, "logical_workers=8 does not divide global_batch_size=12: .* or logical_workers=4"),
        (2, 32, 4, "logical_workers=2 is less than the 4 workers: some would have nothing to do"),
    ],
)
def test_what_cannot_be_is_said_with_what_could(asked, batch, workers, message):
    with pytest.raises(ValueError, match=message):
        choose_logical_workers(asked, batch, workers, consistent=True)


@pytest.mark.parametrize(("asked", "batch", "workers", "chosen"), [(None, 32, 1, 8), (None, 12, 1, 4), (2, 32, 1, 2)])
def test_a_power_of_two_that_divides_the_batch(asked, batch, workers, chosen):
    assert choose_logical_workers(asked, batch, workers, consistent=True) == chosen


@pytest.mark.parametrize(("most", "workers", "chosen"), [(4, 1, 8), (16, 1, 16), (16, 16, 16), (64, 4, 32)])
def test_max_workers_above_the_default_raises_it_however_many_there_are(most, workers, chosen):
    assert choose_logical_workers(None, 32, workers, consistent=True, max_workers=most) == chosen


def test_in_fast_mode_there_is_one_for_each_worker():
    assert choose_logical_workers(None, 7, 3, consistent=False) == 3


@given(st.integers(0, 5).map(lambda bits: 1 << bits), st.integers(0, 5).map(lambda bits: 1 << bits))
def test_each_belongs_to_one_worker_and_neighbours_stay_together(size, share):
    parts = [owned_by(rank, size, size * share) for rank in range(size)]
    assert [one for part in parts for one in part] == list(range(size * share))
    assert all(part.start % len(part) == 0 and is_power_of_two(len(part)) for part in parts)

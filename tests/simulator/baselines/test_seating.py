"""Gangs get blocks; who runs stays where it is unless there is no block otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.model.values import Node
from elasticflow_airflow.scheduler_core.simulator.baselines.common.seating import Room, seat


def layout_of(*sizes: int) -> Layout:
    return Layout([Node(node_id=f"n{i}", slots=size) for i, size in enumerate(sizes)])


def test_room_counts_blocks_and_not_bare_slots() -> None:
    layout = layout_of(3, 3)
    room = Room(layout, layout.availability.slots)
    assert room.slots == 6
    assert room.fits(2)
    assert not room.fits(4)
    room.take(2)
    room.take(2)
    assert room.fits(1)
    assert not room.fits(2)
    room.give_back(2)
    assert room.fits(2)


def test_running_gangs_stay_and_a_newcomer_fills_the_smallest_gap() -> None:
    layout = layout_of(4, 4)
    held = {"a": 0b0001, "b": 0b110000}
    seats = seat(layout, layout.availability.slots, [("a", 1), ("b", 2), ("c", 1)], held)
    assert seats["a"] == held["a"]
    assert seats["b"] == held["b"]
    assert seats["c"] == 0b0010


def test_one_grows_around_its_block_and_another_shrinks_inside_its_own() -> None:
    layout = layout_of(8)
    seats = seat(layout, layout.availability.slots, [("a", 4), ("b", 1)], {"a": 0b0100, "b": 0b110000})
    assert seats["a"] == 0b1111
    assert seats["b"] in (0b010000, 0b100000)


def test_for_a_large_gang_the_fewest_running_ones_move() -> None:
    layout = layout_of(4, 4, 4)
    held = {"a": 0b0001, "b": 0b0010, "c": 0b0001_0000, "d": 0b1111_0000_0000}
    seats = seat(layout, layout.availability.slots, [("a", 1), ("b", 1), ("c", 1), ("d", 4), ("e", 4)], held)
    assert seats["e"] == 0b1111_0000
    assert {job: seats[job] == held[job] for job in held} == {"a": True, "b": True, "c": False, "d": True}


def test_gangs_that_do_not_fit_together_are_refused() -> None:
    layout = layout_of(4)
    with pytest.raises(ValueError, match="gang of 4 does not fit beside"):
        seat(layout, layout.availability.slots, [("a", 4), ("b", 4)], {})


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_has_room_gets_disjoint_blocks(data: Any) -> None:
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=6))
    layout = layout_of(*sizes)
    lost = data.draw(st.integers(0, (1 << len(layout.slots)) - 1))
    usable = layout.availability.slots & ~lost if data.draw(st.booleans()) else layout.availability.slots
    held: dict[str, int] = {}
    for turn in range(4):
        room, wanted = Room(layout, usable), []
        for number, size in enumerate(data.draw(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=12))):
            if room.fits(size):
                room.take(size)
                wanted.append((f"job{number}", size))
        seats = seat(layout, usable, wanted, held)
        assert set(seats) == {job_id for job_id, _ in wanted}, turn
        taken = 0
        for job_id, size in wanted:
            mask = seats[job_id]
            assert mask.bit_count() == size
            assert not mask & taken
            assert not mask & ~usable
            assert layout.enclosing(mask, mask, size) == mask
            taken |= mask
        held = seats

"""Buddy placement by example, and its counting rule against brute force."""

from __future__ import annotations

from functools import reduce
from operator import or_
from types import ModuleType

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import FreeCapacity
from elasticflow_airflow.scheduler_core.model.values import Node, Placement, Slot
from elasticflow_airflow.scheduler_core.model.work import Course, Holding, Work
from elasticflow_airflow.scheduler_core.planning.allocation import while_free
from elasticflow_airflow.scheduler_core.planning.minimum_share import ShareStretch
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft
from elasticflow_airflow.scheduler_core.planning.share_placement import NoPlaceError, place


def layout_of(*sizes: int) -> Layout:
    return Layout([Node(node_id=f"n{i}", slots=size) for i, size in enumerate(sizes)])


def work_of(name: str, mask: int = 0) -> Work:
    return Work(
        job_id=name,
        remaining=1.0,
        since_s=0.0,
        mask=mask,
        size=mask.bit_count(),
        speed_now=1.0,
        starting=False,
        sizes=(1, 2, 4, 8),
        speeds={1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0},
        startup_s=0.0,
        pause_s=0.0,
        tail_s=0.0,
        limit_s=100.0,
    )


def test_a_node_of_six_is_four_and_two_and_three_and_three_hold_no_four() -> None:
    six = layout_of(6)
    assert six.largest(six.availability.slots) == 4
    assert six.capacity(six.availability.slots) == [6, 6, 4]
    threes = layout_of(3, 3)
    assert threes.largest(threes.availability.slots) == 2
    assert threes.capacity(threes.availability.slots) == [6, 4]


def test_two_nodes_of_six_hold_a_gang_of_eight_and_two_of_two() -> None:
    layout = layout_of(6, 6)
    assert layout.capacity(layout.availability.slots) == [12, 12, 8, 8]
    eight = layout.find(layout.availability.slots, 8)
    assert {(slot.node_id, slot.index) for slot in layout.placement_of(eight, Placement(())).slots} == {
        (node, index) for node in ("n0", "n1") for index in range(4)
    }
    rest = layout.availability.slots & ~eight
    assert layout.largest(rest) == 2
    assert len({slot.node_id for slot in layout.placement_of(layout.find(rest, 2), Placement(())).slots}) == 1


def test_a_node_of_six_that_drains_takes_both_its_parts_along() -> None:
    layout = Layout([Node(node_id="a", slots=6), Node(node_id="b", slots=6, draining_until_s=50.0)])
    assert layout.capacity(layout.availability.at(0.0)) == [12, 12, 8, 8]
    assert layout.capacity(layout.availability.at(50.0)) == [6, 6, 4, 0]


def test_whole_equal_nodes_combine_and_three_of_them_make_two_and_one() -> None:
    layout = layout_of(4, 4, 4)
    assert layout.capacity(layout.availability.slots) == [12, 12, 12, 8]
    assert layout.largest(layout.availability.slots) == 8


def test_a_busy_slot_breaks_the_blocks_around_it() -> None:
    layout = Layout([Node(node_id="a", slots=4), Node(node_id="b", slots=4, busy=frozenset({1}))])
    assert layout.largest(layout.availability.slots) == 4
    assert layout.capacity(layout.availability.slots) == [7, 6, 4, 0]


def test_the_smallest_block_that_holds_a_gang_is_taken() -> None:
    layout = layout_of(8)
    assert layout.find(0b11110011, 2) == 0b11
    assert layout.find(0b11110011, 4) == 0b11110000
    assert layout.find(0b11110011, 8) == 0


def test_a_gang_grows_into_the_block_around_it_and_keeps_its_ranks() -> None:
    layout = layout_of(4)
    assert layout.enclosing(0b1111, 0b1000, 2) == 0b1100
    before = Placement((Slot("n0", 3),))
    assert layout.placement_of(0b1100, before).slots == (Slot("n0", 3), Slot("n0", 2))


def test_spanning_gangs_stay_neighbours_when_nodes_go() -> None:
    nodes = [Node(node_id=name, slots=2) for name in "bcd"]
    apart = Layout(nodes)
    gang = Placement(tuple(Slot(n, i) for n in "cd" for i in range(2)))
    assert apart.find(apart.mask_of(gang), 4) == 0
    together = Layout(nodes, [["c", "d"]])
    assert together.find(together.mask_of(gang), 4) == together.mask_of(gang)


def test_who_is_in_the_way_migrates_and_is_counted() -> None:
    layout = layout_of(4)
    works = [work_of("a", 0b0001), work_of("b", 0b0100), work_of("c")]
    shares = {"a": [ShareStretch(0.0, 50.0, 1)], "b": [ShareStretch(0.0, 50.0, 1)], "c": [ShareStretch(10.0, 50.0, 2)]}
    holdings, migrations = place(layout, works, shares, 0.0, 0)
    assert sum(migrations.values()) == 1
    assert holdings["c"][0].mask.bit_count() == 2
    moved = next(iter(migrations))
    assert [h.start_s for h in holdings[moved]] == [0.0, 10.0]


def test_a_draining_node_counts_until_it_goes() -> None:
    layout = Layout([Node(node_id="a", slots=2), Node(node_id="b", slots=2, draining_until_s=50.0)])
    free = FreeCapacity(layout, 0.0)
    assert free.fits(0.0, 50.0, 4)
    assert not free.fits(0.0, 51.0, 4)
    assert free.placeable((1, 2, 4), 0.0, 100.0) == [(0.0, 50.0, 4), (50.0, 100.0, 2)]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4),
    gangs=st.lists(st.sampled_from([1, 1, 2, 4, 8]), min_size=1, max_size=8),
)
def test_counting_by_size_says_exactly_what_can_be_placed(plan_checker: ModuleType, sizes, gangs) -> None:
    layout = layout_of(*sizes)
    free = FreeCapacity(layout, 0.0)
    counted = True
    for gang in gangs:
        counted = counted and free.fits(0.0, 10.0, gang)
        if counted:
            free.reserve(0.0, 10.0, gang)
    assert counted == plan_checker.placeable(gangs, plan_checker.buddy_blocks(sizes))
    works = [work_of(f"j{i}") for i in range(len(gangs))]
    shares = {f"j{i}": [ShareStretch(0.0, 10.0, gang)] for i, gang in enumerate(gangs)}
    try:
        holdings, _ = place(layout, works, shares, 0.0, 0)
    except NoPlaceError:
        assert not counted
        return
    if counted:  # when enough buddy blocks are free, every gang has its place, and only its own
        taken = 0
        for i, gang in enumerate(gangs):
            (holding,) = holdings[f"j{i}"]
            assert holding.mask.bit_count() == gang
            assert layout.find(holding.mask, gang) == holding.mask
            assert holding.mask & taken == 0
            taken |= holding.mask


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.sampled_from([2, 3, 4, 8]), min_size=1, max_size=3),
    reservations=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 20), st.sampled_from([1, 2, 4, 8])), min_size=0, max_size=12
    ),
    top=st.sampled_from([1, 2, 8, 64]),
)
def test_what_is_kept_up_to_date_is_what_counting_anew_would_say(sizes, reservations, top) -> None:
    """``largest`` changes only where something is reserved; ``top`` leaves out sizes, and changes nothing else."""
    layout = layout_of(*sizes)
    free, limited = FreeCapacity(layout, 0.0), FreeCapacity(layout, 0.0, top)
    for begin, length, gang in reservations:
        if free.fits(begin, begin + length, gang):
            free.reserve(begin, begin + length, gang)
            limited.reserve(begin, begin + length, gang)
    least = np.minimum.accumulate(free.rows[:, : len(free.times)], axis=0)
    anew = [sum(least[level, k] >= 1 << level for level in range(free.levels)) for k in range(len(free.times))]
    assert free.largest[: len(free.times)].tolist() == anew
    sizes_asked = tuple(size for size in (1, 2, 4, 8) if size <= top)
    assert limited.placeable(sizes_asked, 0.0, 50.0) == free.placeable(sizes_asked, 0.0, 50.0)
    assert free.copy(top).placeable(sizes_asked, 0.0, 50.0) == free.placeable(sizes_asked, 0.0, 50.0)


def test_a_gang_keeps_slots_that_are_no_block_whoever_looked_for_one_before() -> None:
    layout = layout_of(4)
    draft = Draft(layout, 0.0, {"promised": Course((Holding(0.0, 100.0, 0b1001),), 100.0, 100.0)})
    waits, goes_on = work_of("waits"), work_of("goes on", 0b0110)
    later, kept = while_free(draft, waits, 2), while_free(draft, goes_on, 2)
    assert later is not None
    assert later.holdings[0].start_s == 100.0
    assert kept is not None
    assert kept.holdings[0][:1] + kept.holdings[0][2:] == (0.0, 0b0110)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 2**36 - 1), st.sampled_from([1, 2, 4, 8]))
def test_touching_blocks_are_those_with_a_free_slot(sizes, free, size):
    layout = layout_of(*sizes)
    everything = (1 << len(layout.slots)) - 1
    starts = layout.blocks(everything, size.bit_length() - 1)
    blocks = [((1 << size) - 1) << at for at in range(len(layout.slots)) if starts >> at & 1]
    expected = reduce(or_, (block for block in blocks if block & free & everything), 0)
    assert layout.touching(free & everything, size) == expected

"""Troubles are drawn from the seed alone, make sense together, and come as often as asked for."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.simulator.disturbances import Troubles, disturbances
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.prepare import cluster
from elasticflow_airflow.scheduler_core.simulator.run import Disturbance

HOUR_S = 3600.0
ALL = Troubles(seed=2, mtbf_h=20.0, drain_every_h=30.0, straggler_every_h=100.0)


def test_nothing_goes_wrong_unless_asked_for() -> None:
    assert disturbances(cluster(4, 8), Troubles(), 0.0, 1e9) == []


def test_a_seed_gives_the_same_again_and_another_seed_something_else() -> None:
    nodes = cluster(4, 2)
    first = disturbances(nodes, ALL, 0.0, 200 * HOUR_S)
    assert first == disturbances(nodes, ALL, 0.0, 200 * HOUR_S)
    assert first != disturbances(nodes, Troubles(seed=3, mtbf_h=20.0), 0.0, 200 * HOUR_S)
    assert first == sorted(first, key=lambda one: one.at_s)


def test_another_node_or_another_kind_changes_nothing_of_the_rest() -> None:
    """Failures of a node are the same beside more nodes and with slow slots."""
    alone = disturbances(cluster(3, 2), Troubles(mtbf_h=20.0), 0.0, 200 * HOUR_S)
    beside = disturbances(cluster(5, 2), Troubles(mtbf_h=20.0, straggler_every_h=50.0), 0.0, 200 * HOUR_S)

    def of_first(found: list[Disturbance]) -> list[Disturbance]:
        return [one for one in found if isinstance(one.event, ev.NodeLost) and one.event.node_id == "n0"]

    assert of_first(alone) == of_first(beside) != []


def test_failures_and_repairs_come_as_often_and_last_as_long_as_stated() -> None:
    troubles = Troubles(mtbf_h=50.0, repair_h=2.0)
    found = disturbances(cluster(200, 1), troubles, 0.0, 1000 * HOUR_S)
    lost = [one for one in found if isinstance(one.event, ev.NodeLost)]
    assert len(lost) == pytest.approx(200 * 1000 / 52, rel=0.1)
    back = {(one.event.node.node_id, one.at_s) for one in found if isinstance(one.event, ev.NodeJoined)}
    away = []
    for one in lost:
        assert isinstance(one.event, ev.NodeLost)
        node_id = one.event.node_id
        away.append(min(at for other, at in back if other == node_id and at >= one.at_s) - one.at_s)
    assert mean(away) == pytest.approx(2 * HOUR_S, rel=0.1)


def test_a_drain_is_told_with_its_date_and_the_node_goes_then() -> None:
    troubles = Troubles(drain_every_h=10.0, drain_notice_h=2.0, drain_away_h=1.0)
    told, lost, back = disturbances(cluster(1, 1), troubles, 0.0, 30 * HOUR_S)[:3]
    assert isinstance(told.event, ev.NodeDraining)
    assert told.event.until_s == lost.at_s == told.at_s + 2 * HOUR_S
    assert isinstance(lost.event, ev.NodeLost)
    assert isinstance(back.event, ev.NodeJoined)
    assert back.at_s == lost.at_s + HOUR_S


def test_slow_spells_end_and_stay_within_their_factors() -> None:
    troubles = Troubles(straggler_every_h=10.0, straggler_h=1.0, straggler_factor=(0.5, 0.6))
    speed: dict[object, float] = {}
    for one in disturbances(cluster(2, 4), troubles, 0.0, 100 * HOUR_S):
        assert one.slow is not None
        slot, factor = one.slow
        assert factor == 1.0 if speed.get(slot, 1.0) < 1.0 else 0.5 <= factor <= 0.6
        speed[slot] = factor
    assert len(speed) == 8
    assert set(speed.values()) == {1.0}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), notice_h=st.floats(0.0, 20.0))
def test_a_node_is_lost_only_while_it_is_there_and_joins_only_while_it_is_not(seed: int, notice_h: float) -> None:
    troubles = Troubles(seed=seed, mtbf_h=5.0, repair_h=3.0, drain_every_h=5.0, drain_notice_h=notice_h)
    gone: set[str] = set()
    for one in disturbances(cluster(3, 1), troubles, 100.0, 100 * HOUR_S):
        assert one.at_s > 100.0
        match one.event:
            case ev.NodeLost(node_id):
                assert node_id not in gone
                gone.add(node_id)
            case ev.NodeJoined(node):
                gone.remove(node.node_id)
            case ev.NodeDraining(node_id):
                assert node_id not in gone
    assert gone == set()


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"mtbf_h": 0.0}, "mtbf_h is 0.0; it must be a number of hours above 0"),
        ({"repair_h": -1.0}, "repair_h is -1.0"),
        ({"drain_notice_h": float("nan")}, "drain_notice_h is nan"),
        ({"straggler_named_s": -1.0}, "straggler_named_s is -1.0"),
        ({"straggler_factor": (0.8, 0.4)}, "straggler_factor is"),
        ({"straggler_factor": (0.0, 0.4)}, "straggler_factor is"),
    ],
)
def test_impossible_troubles_are_refused(given_: dict, says: str) -> None:
    with pytest.raises(InputError, match=says.replace("(", r"\(")):
        Troubles(**given_)

"""What Ray's autoscaler is told of the nodes that are wanted, and of those that nobody needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elasticflow_airflow.api.insight import CapacityAnswer, ReleasableNode
from elasticflow_airflow.engines.port import EngineNode
from elasticflow_airflow.service.autoscaling import Autoscaling

UNNEEDED_S = 300.0


@dataclass
class Cluster:
    """Nodes, what was told last, and a clock."""

    present: list[str]
    now: float = 0.0
    answer: CapacityAnswer | None = None
    told: list[tuple[int, set[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scaling = Autoscaling(
            lambda: self.answer,
            lambda: [EngineNode(node_id=one, slots=8, device="cuda", device_type="x") for one in self.present],
            lambda count, unneeded: self.told.append((count, set(unneeded))),
            unneeded_s=UNNEEDED_S,
            monotonic=lambda: self.now,
        )

    def asks(self, wanted: int | None = 0, idle: Sequence[str] = (), busy: Sequence[str] = ()) -> tuple[int, set[str]]:
        """Return what is told for an answer."""
        nodes = [(one, True) for one in idle] + [(one, False) for one in busy]
        self.answer = CapacityAnswer(
            asked_at=self.now,
            until_at=self.now + 3600.0,
            wanted_nodes=wanted,
            releasable=[ReleasableNode(node_id=one, slots=8, idle=is_idle, reason="") for one, is_idle in nodes],
            summary="",
        )
        self.scaling.pass_on()
        return self.told[-1]


def test_nothing_is_told_before_anything_is_known() -> None:
    cluster = Cluster(["a"])
    cluster.scaling.pass_on()
    assert not cluster.told


def test_what_is_wanted_is_asked_for_at_once_and_until_it_is_there() -> None:
    cluster = Cluster(["a", "b"])
    assert cluster.asks(wanted=3) == (5, set())
    cluster.present += ["c", "d", "e"]
    assert cluster.asks() == (5, set())


def test_a_node_goes_when_nobody_needed_it_for_minutes_and_is_not_asked_for_again() -> None:
    cluster = Cluster(["a", "b", "c"])
    assert cluster.asks(idle=["c"]) == (3, set())
    cluster.now = UNNEEDED_S - 1.0
    assert cluster.asks(idle=["c", "b"]) == (3, set())
    cluster.now = UNNEEDED_S
    assert cluster.asks(idle=["c", "b"]) == (2, {"c"})
    cluster.present.remove("c")
    assert cluster.asks(idle=["b"]) == (2, {"c"}), "it is not taken back while it is being removed"


def test_who_needed_it_meanwhile_begins_the_minutes_anew() -> None:
    cluster = Cluster(["a", "b"])
    cluster.asks(idle=["b"])
    cluster.now = 200.0
    cluster.asks()
    cluster.now = 400.0
    assert cluster.asks(idle=["b"]) == (2, set())
    cluster.now = 400.0 + UNNEEDED_S
    assert cluster.asks(idle=["b"]) == (1, {"b"})


def test_a_node_on_which_somebody_trains_does_not_go() -> None:
    cluster = Cluster(["a", "b"])
    for cluster.now in (0.0, UNNEEDED_S):
        assert cluster.asks(busy=["b"]) == (2, set())


def test_the_last_node_stays() -> None:
    cluster = Cluster(["a", "b"])
    for cluster.now in (0.0, UNNEEDED_S, 3 * UNNEEDED_S):
        told = cluster.asks(idle=["a", "b"])
    assert told == (1, {"a"})


def test_nodes_that_are_going_are_taken_back_when_more_are_wanted() -> None:
    cluster = Cluster(["a", "b", "c"])
    for cluster.now in (0.0, UNNEEDED_S):
        told = cluster.asks(idle=["c"])
    assert told == (2, {"c"})
    assert cluster.asks(wanted=1) == (3, set())
    assert cluster.asks(wanted=None) == (3, set()), "what is there must stay"

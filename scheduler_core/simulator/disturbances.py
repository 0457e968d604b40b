"""Disturbances of a simulated cluster, drawn before the simulation and identical for every policy.

Each is drawn from the seed, the node and the kind of disturbance alone, so adding another kind, node or policy does not
change the rest. Knows no jobs and no policy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Node, Slot
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.run import Disturbance

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Troubles:
    """How often each kind of disturbance occurs, as a Poisson process; None means never.

    Raises:
        InputError: a number is out of range.
    """

    seed: int = 0
    mtbf_h: float | None = None
    """Mean time between failures of one node, in hours during which the node is up."""
    repair_h: float = 1.0
    """Mean time until a failed node is back (exponentially distributed)."""
    drain_every_h: float | None = None
    """Mean time between maintenance windows of one node."""
    drain_notice_h: float = 2.0
    """Advance notice of a maintenance window; constant."""
    drain_away_h: float = 1.0
    """How long a drained node is away; constant."""
    straggler_every_h: float | None = None
    """Mean time between slow periods of one slot."""
    straggler_h: float = 2.0
    """Mean length of a slow period (exponentially distributed)."""
    straggler_factor: tuple[float, float] = (0.4, 0.8)
    """A slow slot multiplies the speed of its gang by a factor drawn uniformly between these two."""
    straggler_named_s: float | None = None
    """After a gang of several workers has trained this long with a slow slot, the policy is told which slot it is, so
    that it can move the gang off it. None: never; the policy can only infer it from reported speeds."""

    def __post_init__(self) -> None:
        for name in ("mtbf_h", "drain_every_h", "straggler_every_h"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise InputError(f"{name} is {value!r}; it must be a number of hours above 0 (leave it out for never)")
        for name in ("repair_h", "drain_away_h", "straggler_h"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise InputError(f"{name} is {value!r}; it must be a number of hours above 0")
        if not 0.0 <= self.drain_notice_h < math.inf:
            raise InputError(f"drain_notice_h is {self.drain_notice_h!r}; it must be a number of at least 0")
        named_s = self.straggler_named_s
        if named_s is not None and not 0.0 <= named_s < math.inf:
            raise InputError(
                f"straggler_named_s is {named_s!r}; it must be a number of at least 0 (leave it out for never)"
            )
        low, high = self.straggler_factor
        if not 0.0 < low <= high <= 1.0:
            raise InputError(f"straggler_factor is {self.straggler_factor!r}; it must rise, above 0 and at most 1")

    def sentences(self) -> list[str]:
        """Return a short description of each enabled disturbance, for display."""
        said = []
        if self.mtbf_h is not None:
            said.append(f"a node fails every {self.mtbf_h:g} h")
        if self.drain_every_h is not None:
            said.append(f"maintenance of a node every {self.drain_every_h:g} h, known {self.drain_notice_h:g} h before")
        if self.straggler_every_h is not None:
            said.append(f"a slot is slow every {self.straggler_every_h:g} h, for {self.straggler_h:g} h")
        return said

    def facts(self) -> dict[str, float | int | str | None]:
        """Return the options needed to reproduce the disturbances; None for an option that has no effect."""
        low, high = self.straggler_factor
        fails, drained, slow = (n is not None for n in (self.mtbf_h, self.drain_every_h, self.straggler_every_h))
        return {
            "mtbf_h": self.mtbf_h,
            "repair_h": self.repair_h if fails else None,
            "drain_every_h": self.drain_every_h,
            "drain_notice_h": self.drain_notice_h if drained else None,
            "drain_away_h": self.drain_away_h if drained else None,
            "straggler_every_h": self.straggler_every_h,
            "straggler_h": self.straggler_h if slow else None,
            "straggler_factor": f"{low:g} to {high:g}" if slow else None,
            "straggler_named_s": self.straggler_named_s if slow else None,
        }


@dataclass(frozen=True, slots=True)
class _Absence:
    """A node is away from ``from_s`` until ``until_s``, announced at ``notice_s`` (None: not announced)."""

    from_s: float
    until_s: float
    notice_s: float | None

    @property
    def begins_s(self) -> float:
        return self.from_s if self.notice_s is None else self.notice_s


def disturbances(nodes: Sequence[Node], troubles: Troubles, begin_s: float, end_s: float) -> list[Disturbance]:
    """Return all disturbances of ``nodes`` between two times, in order of time; repairs may come later.

    If two absences of a node overlap, the one that begins later is dropped (a drain begins with its notice).
    """
    found: list[Disturbance] = []
    for node in nodes:
        over = -math.inf
        for absence in sorted(_absences(node, troubles, begin_s, end_s), key=lambda absence: absence.begins_s):
            if absence.begins_s <= over:
                continue
            over = absence.until_s
            if absence.notice_s is not None:
                found.append(Disturbance(absence.notice_s, ev.NodeDraining(node.node_id, absence.from_s)))
            found.append(Disturbance(absence.from_s, ev.NodeLost(node.node_id)))
            found.append(Disturbance(absence.until_s, ev.NodeJoined(node)))
        found += _slow_spells(node, troubles, begin_s, end_s)
    return sorted(found, key=lambda disturbance: disturbance.at_s)


def _absences(node: Node, troubles: Troubles, begin_s: float, end_s: float) -> Iterator[_Absence]:
    if troubles.mtbf_h is not None:
        chaos = random.Random(f"{troubles.seed} failures {node.node_id}")
        at_s = begin_s
        while (at_s := at_s + chaos.expovariate(1.0 / (troubles.mtbf_h * _HOUR_S))) < end_s:
            back_s = at_s + chaos.expovariate(1.0 / (troubles.repair_h * _HOUR_S))
            yield _Absence(at_s, back_s, None)
            at_s = back_s
    if troubles.drain_every_h is not None:
        chaos = random.Random(f"{troubles.seed} drains {node.node_id}")
        at_s = begin_s
        while (at_s := at_s + chaos.expovariate(1.0 / (troubles.drain_every_h * _HOUR_S))) < end_s:
            from_s = at_s + troubles.drain_notice_h * _HOUR_S
            back_s = from_s + troubles.drain_away_h * _HOUR_S
            yield _Absence(from_s, back_s, at_s)
            at_s = back_s


def _slow_spells(node: Node, troubles: Troubles, begin_s: float, end_s: float) -> Iterator[Disturbance]:
    if troubles.straggler_every_h is None:
        return
    for index in range(node.slots):
        chaos = random.Random(f"{troubles.seed} stragglers {node.node_id}:{index}")
        slot, at_s = Slot(node.node_id, index), begin_s
        while (at_s := at_s + chaos.expovariate(1.0 / (troubles.straggler_every_h * _HOUR_S))) < end_s:
            factor = chaos.uniform(*troubles.straggler_factor)
            healthy_s = at_s + chaos.expovariate(1.0 / (troubles.straggler_h * _HOUR_S))
            yield Disturbance(at_s, None, (slot, factor))
            yield Disturbance(healthy_s, None, (slot, 1.0))
            at_s = healthy_s

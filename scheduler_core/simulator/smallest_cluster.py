"""Find the smallest cluster on which a policy keeps all the promises. Knows no files and no plots.

*All the promises* are the deadlines that can be met at all: those of jobs that would meet theirs if they ran alone on
the largest cluster that is tried. They are the same for every policy, so a policy gains nothing by rejecting jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, Setting, play
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.outcome import MET_TOLERANCE_S
from elasticflow_airflow.scheduler_core.simulator.run import Change

EDGE = 2
"""Number of consecutive sizes below the one found that must fail: a policy may do worse with one more node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """``nodes`` is the smallest number on which all promises were kept; None if there is none up to the limit."""

    contender: Contender
    nodes: int | None
    slots_per_node: int
    needed: int
    """Number of deadlines that can be met at all."""
    tried: dict[int, bool]
    """Whether all of them were met, by number of nodes."""

    @property
    def monotone(self) -> bool:
        """Whether no tried size failed that is larger than one that succeeded."""
        kept = [nodes for nodes, kept in self.tried.items() if kept]
        return not kept or not any(nodes > min(kept) and not ok for nodes, ok in self.tried.items())

    def as_row(self) -> dict[str, float | int | str | None]:
        """Return the result as a row of a table."""
        return {
            "policy": self.contender.label,
            "smallest_nodes": self.nodes,
            "smallest_slots": None if self.nodes is None else self.nodes * self.slots_per_node,
            "promises": self.needed,
            "largest_tried_nodes": max(self.tried),
            "monotone": int(self.monotone),
        }


class _BrokenError(Exception):
    """A promise is broken, so the rest of the simulation cannot change the result."""


def smallest_cluster(
    setting: Setting, contender: Contender, limit: int, on_try: Callable[[int], None] | None = None
) -> Capacity:
    """Find the smallest number of equal nodes, at most ``limit``, on which a contender keeps all the promises.

    Doubles from the setting's own size, then bisects, then tries :data:`EDGE` sizes below the one found.

    Raises:
        InputError: a job cannot run even on the largest cluster.
    """
    promised = achievable(setting.resized(limit))
    tried: dict[int, bool] = {}

    def keeps(nodes: int) -> bool:
        if nodes not in tried:
            if on_try is not None:
                on_try(nodes)
            tried[nodes] = _keeps(setting.resized(nodes), contender, promised)
        return tried[nodes]

    high = min(limit, len(setting.nodes))
    low = 0
    while not keeps(high) and high < limit:
        low, high = high, min(limit, 2 * high)
    if not tried[high]:
        return _found(setting, contender, None, promised, tried)
    while high - low > 1:
        middle = (low + high) // 2
        if keeps(middle):
            high = middle
        else:
            low = middle
    below = high - 1
    while below > 0 and high - below <= EDGE:
        if keeps(below):
            high = below
        below -= 1
    return _found(setting, contender, high, promised, tried)


def achievable(setting: Setting) -> dict[str, float]:
    """Return the deadlines, by job, that would be met if the job were alone on the cluster.

    Raises:
        InputError: a job cannot run on the cluster at any size.
    """
    found: dict[str, float] = {}
    largest = Layout(setting.nodes).largest_block
    for simulated in setting.jobs(Contender(policy="elasticflow")):
        job = simulated.job
        fastest = max(speed for size, speed in simulated.truth.items() if size <= largest)
        assert job.total_steps is not None
        end = simulated.arrives_s + job.costs.startup_s + job.total_steps / fastest + job.costs.tail_s
        if job.deadline_s is not None and end <= job.deadline_s + MET_TOLERANCE_S:
            found[job.job_id] = job.deadline_s
    return found


def _keeps(setting: Setting, contender: Contender, promised: dict[str, float]) -> bool:
    def look(change: Change) -> None:
        limit = promised.get(change.job_id)
        if limit is not None and change.event and (change.event == "rejected" or change.at_s > limit + MET_TOLERANCE_S):
            raise _BrokenError

    try:
        played = play(setting, contender, on_change=look)
    except _BrokenError:
        return False
    except InputError:
        return False  # a job does not fit this cluster at any size; on the largest cluster all fit, as checked before
    return all(record.met for record in played.result.records if record.job_id in promised)


def _found(
    setting: Setting, contender: Contender, nodes: int | None, promised: dict[str, float], tried: dict[int, bool]
) -> Capacity:
    return Capacity(
        contender=contender,
        nodes=nodes,
        slots_per_node=setting.nodes[0].slots,
        needed=len(promised),
        tried=dict(sorted(tried.items())),
    )

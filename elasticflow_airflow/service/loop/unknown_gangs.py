"""Gangs unknown to the service, and slots that the engine refuses: nothing is planned on these slots meanwhile.

A database that was lost or restored from a backup has no record of jobs whose workers still run. These workers are told
to save and leave, as their leases are not renewed any more; the slots that they hold do not affect any other job.
Observations and rows in, rows out; calls no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from elasticflow_airflow.api import EventKind
from elasticflow_airflow.engines.port import STANDING, EngineNode, GangObservation, GangState
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Slot
from elasticflow_airflow.service.decisions.pass_context import Held, PassContext, alive
from elasticflow_airflow.service.decisions.setting_aside import slots_of

log = structlog.get_logger()

_RETRY_S = (30.0, 600.0)
"""First and longest wait until a refused slot is planned with again; the wait doubles with each refusal."""
_LONGER_S = 60.0
"""Extra time for a gang that should have left by now."""

_Key = tuple[str, int]


@dataclass(slots=True)
class _Refusal:
    """A slot that the engine refused: its holder, until when it is avoided (UTC seconds), and how often in a row."""

    holder: str
    until_s: float
    times: int = 1
    unseen: bool = False
    """Whether the engine refuses the slot but lists it as free."""


@dataclass(slots=True)
class Leftovers:
    """Observed gangs that belong to no job of this service, and slots that were refused."""

    _gangs: dict[_Key, GangObservation] = field(default_factory=dict)
    """Gangs that have no row and have not ended."""
    _leave_s: dict[_Key, float] = field(default_factory=dict)
    """When these gangs should have left (UTC seconds)."""
    _refused: dict[Slot, _Refusal] = field(default_factory=dict)
    _told: dict[_Key, str] = field(default_factory=dict)
    """Gangs that a stored event has announced, with the slots that it names."""
    _telling: dict[_Key, str] = field(default_factory=dict)
    """The value of ``_told`` once the pass is stored."""

    def look(self, context: PassContext, observations: Sequence[GangObservation], seen: Iterable[EngineNode]) -> None:
        """Find gangs that belong to no job, and announce each once; ``seen`` are the nodes that the engine reports."""
        known = {(one.job_id, one.generation) for one in context.tx.current_generations}
        strangers = [gang for gang in observations if (gang.job_id, gang.generation) not in known]
        self._gangs = {(g.job_id, g.generation): g for g in strangers if g.state is not GangState.ENDED}
        leave_s = context.now + 2 * context.settings.grace_s
        for key in self._gangs:
            if self._leave_s.setdefault(key, leave_s) <= context.now:
                self._leave_s[key] = context.now + _LONGER_S
        self._leave_s = {key: at_s for key, at_s in self._leave_s.items() if key in self._gangs}
        for gang in strangers:
            if gang.state is GangState.ENDED:
                _clear(context, gang)
        self._tell(context)
        for node in seen:
            for index in node.busy:
                self._refused.pop(Slot(node.node_id, index), None)  # From now on the engine reports when it is free.
        for refusal in self._refused.values():
            refusal.unseen = True

    def _tell(self, context: PassContext) -> None:
        self._telling = {key: _names(_slots(gang)) for key, gang in self._gangs.items()}
        for key, slots in self._telling.items():
            if key not in self._told:
                reason = Reason(
                    "{gang} holds {slots}, and is of no job of this service: it is told to save and leave; until then "
                    "nothing is planned on its slots",
                    gang=_gang(key),
                    slots=slots,
                )
                context.tx.add_event(EventKind.LEFTOVER, reason)
                log.warning("a gang is of no job of this service", job_id=key[0], generation=key[1], slots=slots)
        for key in self._told.keys() - self._telling.keys():
            context.tx.add_event(
                EventKind.LEFTOVER_GONE,
                Reason("{gang} has left: its slots ({slots}) are used again", gang=_gang(key), slots=self._told[key]),
            )

    def stored(self) -> None:
        """Note that the pass is stored, and its events with it."""
        self._told = self._telling

    def refuse(self, held: Mapping[Slot, str], now: float) -> None:
        """Note that the engine refused to start a gang on these slots."""
        for slot, holder in held.items():
            before = self._refused.get(slot)
            if before is None:
                self._refused[slot] = _Refusal(holder, now + _RETRY_S[0])
            elif before.until_s <= now:
                before.holder, before.until_s = holder, now + min(_RETRY_S[1], _RETRY_S[0] * 2**before.times)
                before.times += 1

    def took(self, slots: Iterable[Slot]) -> None:
        """Note that a gang has started on these slots."""
        for slot in slots:
            self._refused.pop(slot, None)

    def held(self, context: PassContext) -> dict[Slot, Held]:
        """Return the slots on which nothing is to be planned; slots of our own living gangs are never among them."""
        found = {
            slot: Held(one.holder, one.until_s) for slot, one in self._refused.items() if one.until_s > context.now
        }
        for key, gang in self._gangs.items():
            found |= {slot: Held(_of_nobody(key), self._leave_s[key]) for slot in _slots(gang)}
        if not found:
            return {}
        ours = {slot for one in context.generations.values() if alive(one) for slot in slots_of(one)}
        return {slot: held for slot, held in found.items() if slot not in ours}

    def problems(self, now: float) -> list[str]:
        """Return the problems to report in the service's health."""
        told = [
            f"{_gang(key)} holds {_names(_slots(gang))}, and is of no job of this service (was"
            " its database lost, or put back from a copy?): nothing is planned there until it has saved and left, as it"
            " was told to; if it does not, end its processes"
            for key, gang in list(self._gangs.items())
        ]
        return told + [
            f"slot {slot.name} is held by {one.holder}: nothing is planned there until it is tried again; if nobody"
            " needs it, end that process"
            for slot, one in list(self._refused.items())
            if one.unseen and one.until_s > now
        ]

    def to_leave(self, context: PassContext) -> list[str]:
        """Return the jobs none of whose gangs is ours: these gangs can be stopped by job id.

        If a job has another generation that is ours, starting that one stops the generations before it.
        """
        mine = {job_id for job_id, _ in context.generations} | {row.job_id for row in context.aside}
        return sorted({job_id for job_id, _ in self._gangs} - mine)


def number_above(context: PassContext, latest: Callable[[str], int], *, everyone: bool) -> None:
    """Raise jobs' generation numbers to the latest that the engine knows, so that none is ever used twice.

    This includes numbers from any earlier life of the service. Checks new jobs, or ``everyone`` when the scheduler is
    rebuilt from the store.
    """
    for row in context.rows:
        if everyone or not row.introduced:
            job = context.jobs[row.job_id]
            known = latest(row.job_id)
            if known > job.generation:
                job.generation = known


def _clear(context: PassContext, gang: GangObservation) -> None:
    """Note that a gang is gone: a generation of the same job may start, unless an older open one comes before it."""
    for row in context.incarnations_of(gang.job_id):
        if not row.terminal and all(g.generation > gang.generation for g in context.open_of(row)):
            row.cleared_generation = max(row.cleared_generation, gang.generation)


def _slots(gang: GangObservation) -> list[Slot]:
    """Return the slots on which a gang may have processes."""
    return [worker.slot for worker in gang.workers if worker.exit_code is None] if gang.state in STANDING else []


def _names(slots: Iterable[Slot]) -> str:
    return ", ".join(slot.name for slot in slots) or "no slots"


def _gang(key: _Key) -> Reason:
    return Reason("a gang of {job:job} (generation {generation})", job=key[0], generation=key[1])


def _of_nobody(key: _Key) -> str:
    return f"{_gang(key)}, which is of no job of this service and is to leave"

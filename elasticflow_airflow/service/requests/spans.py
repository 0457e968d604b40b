"""Computes which slots a job held and when they computed, for a Gantt chart, from the rows of its generations.

Pure functions over rows. During an in-place change a job has two generations: the one that trains on, and the one whose
new workers get ready. Each slot is shown with one of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elasticflow_airflow.api.insight import Span
from elasticflow_airflow.runtime.protocol import RescaleMode
from elasticflow_airflow.scheduler_core.model.values import Reservation
from elasticflow_airflow.service.store.held_slots import Held, Interval, union
from elasticflow_airflow.service.store.tables import GenerationRow, JobRow
from elasticflow_airflow.service.store.views import told

JOIN = "join"
"""The purpose of a span in which new workers prepare to join a training that runs on other slots."""


def spans_of(job: JobRow, generations: Sequence[GenerationRow]) -> list[Span]:
    """Return the generations of one job as spans, oldest first, without those that never held a slot."""
    found: list[Span] = []
    switches = _switches(generations)
    for generation in generations:
        if generation.holding_at is None:
            continue
        ends = (generation.ended_at, switches.get(generation.generation))
        ended_at = min((at for at in ends if at is not None), default=None)
        slots = [(str(node), int(index)) for node, index in generation.placement]
        before = next((g for g in generations if g.generation == generation.continues), None)
        if generation.mode == RescaleMode.IN_PLACE and before is not None:
            had = {(str(node), int(index)) for node, index in before.placement}
            new = [slot for slot in slots if slot not in had]
            switched_at = generation.running_at
            if new:
                until_at = switched_at if switched_at is not None else generation.ended_at
                found.append(_span(job, generation, new, generation.holding_at, None, until_at, purpose=JOIN))
            if switched_at is not None:
                pause_s = pause_of(generation)
                found.append(_span(job, generation, slots, switched_at, switched_at, ended_at, pause_s))
            continue
        found.append(_span(job, generation, slots, generation.holding_at, generation.running_at, ended_at))
    return found


def _span(
    job: JobRow,
    generation: GenerationRow,
    slots: list[tuple[str, int]],
    from_at: float,
    running_at: float | None,
    until_at: float | None,
    pause_s: float = 0.0,
    purpose: str | None = None,
) -> Span:
    return Span.model_validate(
        {
            **names_of(job),
            "incarnation": generation.incarnation,
            "generation": generation.generation,
            "from_at": from_at,
            "running_at": running_at,
            "until_at": until_at,
            "workers": len(slots),
            "slots": slots,
            "pause_s": pause_s,
            "purpose": purpose or generation.purpose,
            **told(reason=generation.reason),
        }
    )


def planned_spans(
    names: Mapping[str, object], incarnation: int, reserved: Iterable[Reservation], now: float, purpose: str = "train"
) -> list[Span]:
    """Return the reservations of a plan from now on as spans. ``names``: the job's job_id, dag_id, task_id, run_id."""
    return [
        Span.model_validate(
            {
                **names,
                "incarnation": incarnation,
                "from_at": max(now, one.start_s),
                "until_at": None if one.end_s == float("inf") else one.end_s,
                "workers": one.placement.workers,
                "slots": [(slot.node_id, slot.index) for slot in one.placement.slots],
                "purpose": purpose,
            }
        )
        for one in reserved
        if one.end_s > now
    ]


def names_of(job: JobRow) -> dict[str, object]:
    """Return the fields of a span that identify the job."""
    identity = job.identity
    return {
        "job_id": job.job_id,
        "dag_id": job.dag_id,
        "task_id": identity.task_id,
        "run_id": identity.run_id,
        "map_index": identity.map_index,
        "namespace": identity.namespace,
    }


def pause_of(generation: Held) -> float:
    """Return how long training paused for an in-place change, in seconds."""
    pause_s = generation.notes.switch.pause_s
    return 0.0 if pause_s is None else max(0.0, pause_s)


def computing(generations: Sequence[Held], now: float) -> list[Interval]:
    """Return when the slots of one job trained: as ``held_slots.holdings``, without start-up, pauses and last save."""
    by_slot: dict[tuple[str, int], list[Interval]] = {}
    switches = _switches(generations)
    pauses = {g.continues: pause_of(g) for g in generations if g.mode == RescaleMode.IN_PLACE}
    for g in generations:
        if g.running_at is None:
            continue
        until = now if g.ended_at is None else g.ended_at
        switched_at = switches.get(g.generation)
        if switched_at is not None:
            until = min(until, switched_at - pauses.get(g.generation, 0.0))
        elif g.ended_at is not None and g.last_step_at is not None:
            until = min(until, g.last_step_at)
        for node, index in g.placement:
            by_slot.setdefault((str(node), int(index)), []).append((g.running_at, until))
    return [one for intervals in by_slot.values() for one in union(intervals)]


def add_up(parts: list[float], intervals: Iterable[Interval], from_at: float, part_s: float) -> None:
    """Add to each part (``part_s`` seconds long, from ``from_at`` on) the seconds of ``intervals`` within it."""
    for since, until in intervals:
        first, last = max(0.0, (since - from_at) / part_s), min(float(len(parts)), (until - from_at) / part_s)
        index = int(first)
        while index < last:
            parts[index] += (min(last, index + 1.0) - max(first, float(index))) * part_s
            index += 1


def by_job(rows: Iterable[tuple[JobRow, GenerationRow]]) -> list[tuple[JobRow, list[GenerationRow]]]:
    """Group generations by job, oldest first."""
    found: dict[str, tuple[JobRow, list[GenerationRow]]] = {}
    for job, generation in rows:
        found.setdefault(job.job_id, (job, []))[1].append(generation)
    for _, generations in found.values():
        generations.sort(key=lambda g: g.generation)
    return list(found.values())


def _switches(generations: Sequence[Held]) -> dict[int, float]:
    """Return when the workers of a generation continued in another one, by number of the earlier generation."""
    found: dict[int, float] = {}
    for g in generations:
        if g.mode == RescaleMode.IN_PLACE and g.continues is not None and g.running_at is not None:
            found[g.continues] = min(g.running_at, found.get(g.continues, g.running_at))
    return found

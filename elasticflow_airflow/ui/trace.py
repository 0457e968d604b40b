"""Converts a job's story to the Trace Event Format of Perfetto and chrome://tracing. Pure: values in, a dict out.

Times in the trace are microseconds since the job's submission. It has one row for each slot that the job's workers
held, and one for decisions.
"""

from __future__ import annotations

from typing import Any

from elasticflow_airflow.api import Event
from elasticflow_airflow.api.insight import JobStory, Span

_JOB, _PLAN = 1, 2
_DECISIONS = 1
_FIRST_SLOT = 10


def chrome_trace(story: JobStory, events: list[Event], now: float) -> dict[str, Any]:
    """Return a trace of the generations, pauses, decisions, checkpoints and samples of one incarnation."""
    status = story.status
    zero = status.submitted_at
    name = f"{status.identity.dag_id}.{status.identity.task_id}"
    made: list[dict[str, Any]] = [
        _named("process_name", _JOB, 0, name),
        _named("process_name", _PLAN, 0, f"{name} (planned)"),
        _named("thread_name", _JOB, _DECISIONS, "decisions"),
    ]
    rows = _rows([*story.generations, *story.planned])
    for (node, index), row in rows.items():
        made += [_named("thread_name", pid, row, f"{node} slot {index}") for pid in (_JOB, _PLAN)]
    for span in story.generations:
        made += _slices(span, rows, _JOB, zero, now)
    for span in story.planned:
        made += _slices(span, rows, _PLAN, zero, now)
    for event in events:
        made.append(
            _instant(event.kind, event.at - zero, {"reason": event.reason, "event_id": event.event_id, **event.data})
        )
    for kept in story.checkpoints:
        if kept.at is not None:
            made.append(_instant("checkpoint", kept.at - zero, {"step": kept.step, "promoted": kept.promoted}))
    if status.deadline_at is not None:
        made.append(_instant("deadline", status.deadline_at - zero, {}))
    for sample in story.samples:
        for counter, value in (("loss", sample.loss), ("steps/s", sample.steps_per_s), ("workers", sample.workers)):
            if value is not None:
                made.append(
                    {"name": counter, "ph": "C", "pid": _JOB, "ts": _us(sample.at - zero), "args": {counter: value}}
                )
    return {
        "traceEvents": made,
        "displayTimeUnit": "ms",
        "otherData": {
            "job_id": status.job_id,
            "run_id": status.identity.run_id,
            "incarnation": status.incarnation,
            "zero_utc_s": zero,
        },
    }


def _rows(spans: list[Span]) -> dict[tuple[str, int], int]:
    slots = sorted({slot for span in spans for slot in span.slots})
    return {slot: _FIRST_SLOT + number for number, slot in enumerate(slots)}


def _slices(span: Span, rows: dict[tuple[str, int], int], pid: int, zero: float, now: float) -> list[dict[str, Any]]:
    until = span.until_at if span.until_at is not None else max(now, span.from_at)
    what = f"{span.workers} worker{'' if span.workers == 1 else 's'}"
    told = {"generation": span.generation, "purpose": span.purpose, "reason": span.reason}
    made = []
    for slot in span.slots:
        row = rows[slot]
        if span.running_at is not None and span.running_at > span.from_at:
            made.append(_slice("starting", pid, row, span.from_at - zero, span.running_at - span.from_at, {}))
        start = span.running_at if span.running_at is not None else span.from_at
        made.append(_slice(what, pid, row, start - zero, until - start, told))
    return made


def _slice(name: str, pid: int, row: int, at_s: float, for_s: float, told: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": _us(at_s), "dur": _us(max(0.0, for_s))}
    return {"name": name, "ph": "X", "pid": pid, "tid": row, **times, "args": told}


def _instant(name: str, at_s: float, told: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "i", "s": "p", "pid": _JOB, "tid": _DECISIONS, "ts": _us(at_s), "args": told}


def _named(kind: str, pid: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": row, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)

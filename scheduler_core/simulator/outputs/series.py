"""Convert schedules and results to series of numbers, for plots and tables. Pure; draws nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from elasticflow_airflow.scheduler_core.model.values import Node, Slot
from elasticflow_airflow.scheduler_core.simulator.outcome import SimulatedOutcome
from elasticflow_airflow.scheduler_core.simulator.run import Change


class SlotSpan(NamedTuple):
    """A job holds a set of slots from ``begin_s`` to ``end_s``."""

    job_id: str
    begin_s: float
    end_s: float
    slots: tuple[Slot, ...]


def spans(changes: Iterable[Change]) -> list[SlotSpan]:
    """Return the slots each job held and when, in order of end; slots held at the end of the schedule are left out."""
    held: dict[str, Change] = {}
    found: list[SlotSpan] = []
    for change in changes:
        before = held.pop(change.job_id, None)
        if before is not None and change.at_s > before.at_s:
            found.append(SlotSpan(change.job_id, before.at_s, change.at_s, before.slots))
        if change.slots and not change.event:
            held[change.job_id] = change
    return found


def mean_use(found: Sequence[SlotSpan], begin_s: float, end_s: float, bins: int) -> list[float]:
    """Return the mean number of slots held in each of ``bins`` equal parts of ``begin_s`` to ``end_s``."""
    width = (end_s - begin_s) / bins
    used = [0.0] * bins
    for span in found:
        low, high = max(span.begin_s, begin_s), min(span.end_s, end_s)
        if high <= low:
            continue
        first, last = int((low - begin_s) / width), min(bins - 1, int((high - begin_s) / width))
        for part in range(first, last + 1):
            inside = min(high, begin_s + (part + 1) * width) - max(low, begin_s + part * width)
            used[part] += len(span.slots) * max(0.0, inside)
    return [value / width for value in used]


def busiest_window(found: Sequence[SlotSpan], length_s: float) -> tuple[float, float]:
    """Return the window of this length with the most changes, among those that begin with a span."""
    starts = sorted(span.begin_s for span in found)
    best, begin, last = 0, starts[0] if starts else 0.0, 0
    for i, start in enumerate(starts):
        while last < len(starts) and starts[last] <= start + length_s:
            last += 1
        if last - i > best:
            best, begin = last - i, start
    return begin, begin + length_s


def rows_of(nodes: Sequence[Node]) -> dict[Slot, int]:
    """Return a row number for each slot, node by node."""
    ordered = [Slot(node.node_id, index) for node in nodes for index in range(node.slots)]
    return {slot: row for row, slot in enumerate(ordered)}


def blocks(slots: Iterable[Slot], rows: Mapping[Slot, int]) -> list[tuple[int, int]]:
    """Return the rows of a gang as (first, number) of each contiguous block."""
    found: list[tuple[int, int]] = []
    for row in sorted(rows[slot] for slot in slots):
        if found and row == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((row, 1))
    return found


def completion_cdf(records: Sequence[SimulatedOutcome]) -> tuple[list[float], list[float]]:
    """Return the completion times in order, and the fraction of all jobs done within each."""
    done = sorted(record.completion_s for record in records if record.completion_s is not None)
    return done, [(i + 1) / len(records) for i in range(len(done))]

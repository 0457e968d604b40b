"""How long the generations of a job held slots, from their rows. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from elasticflow_airflow.scheduler_core.model.decisions import Purpose
from elasticflow_airflow.service.store.store import HeldSlots
from elasticflow_airflow.service.store.tables import GenerationRow

Interval = tuple[float, float]
Held = GenerationRow | HeldSlots


def gpu_seconds(generations: Sequence[Held], now: float) -> float:
    """Return the seconds for which slots were held; slots shared by two generations (a change in place) count once."""
    return sum((until - since for since, until in holdings(generations, now)), 0.0)


def holdings(generations: Sequence[Held], now: float) -> list[Interval]:
    """Return when the slots of one job were held, as intervals; those of the same slot do not overlap."""
    by_slot: dict[tuple[str, int], list[Interval]] = {}
    for g in generations:
        if g.holding_at is not None:
            for node, index in g.placement:
                until = now if g.ended_at is None else g.ended_at
                by_slot.setdefault((str(node), int(index)), []).append((g.holding_at, until))
    return [one for intervals in by_slot.values() for one in union(intervals)]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as intervals that do not overlap, in order."""
    found: list[Interval] = []
    for since, until in sorted(intervals):
        if until <= since:
            continue
        if found and since <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], until))
        else:
            found.append((since, until))
    return found


def rescales(generations: list[GenerationRow]) -> int:
    """Return how often the number of workers changed between gangs that trained (without profiling)."""
    sizes = [g.workers for g in generations if g.purpose == Purpose.TRAIN and g.running_at is not None]
    return sum(1 for before, after in pairwise(sizes) if before != after)

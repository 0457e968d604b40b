"""Modelled changes in place: a gang goes on in the next one, as soon as new workers are there, at a step boundary.

A function of time over two gangs of a job; knows no clock, thread or process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from elasticflow_airflow.engines.fake_gang import CheckpointWriter, FakeGang
from elasticflow_airflow.engines.port import GangOutcome

_GOES_ON = ("running", "broken", "hanging")


def base_of(gangs: Sequence[FakeGang]) -> FakeGang | None:
    """The gang of a job whose living workers can go on in another one; None when there is none."""
    for gang in reversed(gangs):
        if gang.phase in _GOES_ON and gang.leave_s is None and gang.behaviour.in_place:
            return gang
    return None


def begin(change: FakeGang, base: FakeGang, now_s: float) -> None:
    """Start the workers that are to join; those that go on keep their ids."""
    staying = {
        slot: base.worker_id(rank)
        for rank, slot in enumerate(base.spec.placement)
        if base.worker_id(rank) not in base.dead and base.worker_id(rank) not in change.spec.lost
    }
    number = change.spec.generation
    change.members = [
        staying.get(slot, f"g{number:06d}-r{rank:03d}") for rank, slot in enumerate(change.spec.placement)
    ]
    change.continues = base.spec.generation
    change.behaviour = base.behaviour
    if base.phase == "hanging":  # whoever hung is killed
        change.behaviour = replace(base.behaviour, hang_at_step=None)
    change.start(now_s)
    joins = any(slot not in staying for slot in change.spec.placement)
    join_s = change.behaviour.startup_s if change.behaviour.join_s is None else change.behaviour.join_s
    change.phase, change.phase_ends_s = "joining", now_s + (join_s if joins else 0.0)


def interrupt(gangs: Sequence[FakeGang], base: FakeGang, rank: int, exit_code: int) -> None:
    """A worker dies in the middle of a switch: the others are where they were, and it does not come about any more."""
    for change in gangs:
        if change.phase == "switching":
            change.phase, change.phase_ends_s = "joining", change.now_s
            if base.worker_id(rank) in change.members:
                change.dead[base.worker_id(rank)] = exit_code
    base.phase = "running"


def advance_job(gangs: Sequence[FakeGang], now_s: float, write: CheckpointWriter) -> None:
    """Carry all gangs of a job to the present, the change that is under way included."""
    while True:
        change = next((gang for gang in gangs if gang.phase in ("joining", "switching")), None)
        base = next((g for g in gangs if change and g.spec.generation == change.continues), None)
        at_s = now_s if change is None else min(now_s, _ready_s(change, base))
        for gang in gangs:
            if gang is not change:
                gang.advance(at_s, write)
        if change is None:
            return
        if base is not None and _ready_s(change, base) <= at_s:
            _proceed(change, base, max(at_s, change.now_s))
        elif at_s >= now_s:
            change.now_s = max(change.now_s, now_s)
            if change.lease_ends_s <= now_s:
                change.leave(now_s, change.spec.grace_s)
            return


def _ready_s(change: FakeGang, base: FakeGang | None) -> float:
    """When the next thing happens to a change; infinite while it waits for something that does not come by itself."""
    if base is None or change.dead:
        return math.inf
    if change.phase == "switching":
        return change.phase_ends_s if base.phase == "handing" else math.inf
    named = set(base.dead) <= set(change.spec.lost) and bool(change.spec.lost)
    if base.phase == "running" or (base.phase in _GOES_ON and named):
        return change.phase_ends_s
    return math.inf


def _proceed(change: FakeGang, base: FakeGang, at_s: float) -> None:
    change.now_s = base.now_s = at_s
    if change.phase == "joining":
        recovers = base.phase != "running"
        base.step = change.step = float(math.floor(base.step + 1e-9))
        base.phase, base.phase_ends_s = "handing", math.inf
        for worker_id in change.spec.lost:
            if worker_id in [base.worker_id(rank) for rank in range(base.workers)]:
                base.dead.setdefault(worker_id, -9)
        change.failure = "recovers" if recovers else None
        change.phase, change.phase_ends_s = "switching", at_s + change.behaviour.in_place_pause_s
        return
    recovered, change.failure = change.failure is not None, None
    change.phase, change.phase_ends_s = "running", math.inf
    for rank in range(change.workers):
        stays = change.worker_id(rank) in [base.worker_id(r) for r in range(base.workers)]
        told = {"from_generation": base.spec.generation, "recovered": recovered} if stays else {}
        cost = {"pause_s": change.behaviour.in_place_pause_s, "state_bytes": change.behaviour.state_bytes}
        change.say_started(rank, **told, **(cost if stays else {}))
    change.begin_to_report()
    going_on = set(change.members)
    leavers = [r for r in range(base.workers) if base.worker_id(r) not in going_on | set(base.dead)]
    if leavers:
        base.phase, base.phase_ends_s = "thinning", at_s + base.behaviour.save_s
    else:
        base.end(GangOutcome.STOPPED, 0)

"""Modelled changes in place: a gang continues as the next one at a step boundary, once the new workers are up.

A function of time over two gangs of a job; knows no clock, thread or process.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Sequence

from elasticflow_airflow.engines.fake.gang import CheckpointWriter, FakeGang
from elasticflow_airflow.engines.port import GangOutcome
from elasticflow_airflow.scheduler_core.model.values import Slot

_GOES_ON = ("running", "broken", "hanging")


def base_of(gangs: Sequence[FakeGang]) -> FakeGang | None:
    """Return the gang of a job whose live workers can continue in another gang; None when there is none."""
    for gang in reversed(gangs):
        if gang.phase in (*_GOES_ON, "handing") and gang.leave_s is None and gang.behaviour.in_place:
            return gang
    return None


def staying_of(base: FakeGang, lost: Collection[str]) -> dict[Slot, str]:
    """Return the ids of the workers that can continue, by slot: those that are alive and not in ``lost``."""
    ids = {base.spec.placement[rank]: base.worker_id(rank) for rank in base.living()}
    return {slot: worker_id for slot, worker_id in ids.items() if worker_id not in lost}


def give_up(gangs: Sequence[FakeGang], now_s: float) -> None:
    """Abandon an uncompleted change: its joining workers end, the training gang continues unchanged."""
    for gang in gangs:
        if gang.phase in ("joining", "switching"):
            gang.leave(now_s, gang.spec.grace_s)
        if gang.phase == "handing":
            gang.phase = "running"
            gang.wait_for_plan()


def begin(change: FakeGang, base: FakeGang, gangs: Sequence[FakeGang], now_s: float) -> None:
    """Start the joining workers and kill the lost ones; workers that continue keep their ids."""
    staying = staying_of(base, change.spec.lost)
    number = change.spec.generation
    change.members = [
        staying.get(slot, f"g{number:06d}-r{rank:03d}") for rank, slot in enumerate(change.spec.placement)
    ]
    change.continues = base.spec.generation
    for rank in base.living():
        if base.worker_id(rank) in change.spec.lost:
            base.break_down(rank, -signal.SIGKILL)
    behaviour = change.behaviour = base.behaviour
    change.start(now_s)
    joiners = [name for name in change.members if name not in staying.values()]
    change.doomed = joiners[: max(0, behaviour.joiner_dies - sum(len(gang.doomed) for gang in gangs))]
    join_s = behaviour.startup_s if behaviour.join_s is None else behaviour.join_s
    change.phase, change.phase_ends_s = "joining", now_s + (join_s if joiners else 0.0)


def die(gangs: Sequence[FakeGang], worker_id: str, exit_code: int) -> bool:
    """Let a worker of a job die; return False when its gang cannot continue without it.

    The gang continues when its session can change in place, another of its workers is alive, and the death is not a
    failure of the script (a positive exit code). With exit code 0 the worker leaves silently and the others wait.
    Raises KeyError for a worker that is not alive.
    """
    homes = [gang for gang in gangs if worker_id in [gang.worker_id(rank) for rank in gang.living()]]
    if not homes:
        raise KeyError(f"no worker {worker_id!r} is running")
    base, *changes = homes
    if base.phase in ("joining", "switching"):  # a joining worker: no other worker is affected
        _interrupt(gangs)
        base.dead[worker_id] = exit_code
        return True
    _interrupt(gangs)
    rank = next(rank for rank in base.living() if base.worker_id(rank) == worker_id)
    goes_on = exit_code <= 0 and base.behaviour.in_place and base.phase in _GOES_ON and len(base.living()) > 1
    if not goes_on:
        return False
    base.break_down(rank, exit_code)
    for change in changes:  # it has the same workers and cannot complete without this one
        change.dead[worker_id] = exit_code
    return True


def hang(gangs: Sequence[FakeGang], base: FakeGang, rank: int) -> None:
    """Let a worker hang; the others wait for it in the middle of a step."""
    _interrupt(gangs)
    base.hung.append(base.worker_id(rank))
    if base.phase == "running":
        base.phase, base.phase_ends_s = "hanging", math.inf


def _interrupt(gangs: Sequence[FakeGang]) -> None:
    """Roll back a switch during which a worker died: the others resume where they were, the switch is cancelled."""
    for gang in gangs:
        if gang.phase == "switching":
            gang.phase, gang.phase_ends_s = "joining", gang.now_s
        if gang.phase == "handing":
            gang.phase = "running"
            gang.wait_for_plan()


def advance_job(gangs: Sequence[FakeGang], now_s: float, write: CheckpointWriter) -> None:
    """Advance all gangs of a job to ``now_s``, including a change in progress."""
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
    """Return the time of the next event of a change; infinity while it waits for an external event."""
    if base is None or change.dead:
        return math.inf
    if change.phase == "switching":
        return change.phase_ends_s if base.phase == "handing" else math.inf
    if change.doomed:
        return change.phase_ends_s
    if change.behaviour.never_switches or set(base.hung) - set(base.dead):
        return math.inf
    waits = base.phase == "broken" and set(base.dead) <= set(change.spec.lost)
    return change.phase_ends_s if base.phase == "running" or waits else math.inf


def _proceed(change: FakeGang, base: FakeGang, at_s: float) -> None:
    change.now_s = base.now_s = at_s
    pause_s = change.behaviour.in_place_pause_s
    if change.phase == "joining" and change.doomed:
        change.dead.update(dict.fromkeys(change.doomed, -signal.SIGKILL))
        return
    if change.phase == "joining":
        change.recovers = base.phase == "broken"
        base.step = change.step = float(math.floor(base.step + 1e-9))
        base.phase, base.phase_ends_s = "handing", math.inf
        change.phase, change.phase_ends_s = "switching", at_s + pause_s
        return
    change.phase, change.phase_ends_s = "running", math.inf
    base.gone_on = [name for name in (base.worker_id(rank) for rank in base.living()) if name in change.members]
    for rank in range(change.workers):
        change.say_started(
            rank,
            from_generation=base.spec.generation if change.worker_id(rank) in base.gone_on else 0,
            pause_s=pause_s,
            state_bytes=change.behaviour.state_bytes,
            recovered=change.recovers,
        )
    change.begin_to_report()
    if base.living():
        base.phase, base.phase_ends_s = "thinning", at_s + base.behaviour.save_s
    else:
        base.end(GangOutcome.STOPPED, 0)

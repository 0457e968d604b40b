"""Which worker of a gang that makes no step holds the others up, by the heartbeat files that the workers write.

Reads small files of an incarnation's folder; knows no rows. What a file that is missing means nobody can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticflow_airflow.runtime.protocol import heartbeat_path, read_json

_WAITING = ("reduce", "wait")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a worker said last: the step it is at, what it is doing, and when (UTC seconds, its own clock)."""

    step: int
    phase: str
    at_s: float


def read_heartbeat(folder: Path, worker_id: str) -> Heartbeat | None:
    """Read the last sign of life of a worker; None when there is none, or none that can be read."""
    try:
        raw = read_json(heartbeat_path(folder, worker_id))
        return None if raw is None else Heartbeat(int(raw["step"]), str(raw["phase"]), float(raw["at_s"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None  # Half written by a machine that went down, or of another version: the same as none.


def find_hung(beats: Mapping[str, Heartbeat | None], *, limit_s: float, only_silent: bool) -> set[str]:
    """Workers that hold up the others; empty when nobody can be singled out, or nobody would be left.

    Whoever has been silent for ``limit_s`` while another still says that it waits. If all say something, and with
    ``only_silent`` False: whoever computes what the others have computed long ago. The workers' clocks are compared
    with each other only, so that a machine that slept makes nobody suspect.
    """
    known = {worker_id: beat for worker_id, beat in beats.items() if beat is not None}
    if len(beats) < 2 or not known:
        return set()
    latest_s = max(beat.at_s for beat in known.values())
    silent = {worker_id for worker_id, beat in known.items() if latest_s - beat.at_s > limit_s}
    lively = {worker_id: beat for worker_id, beat in known.items() if worker_id not in silent}
    if not any(beat.phase in _WAITING for beat in lively.values()):
        return set()
    if silent:
        return silent
    if only_silent or len(known) < len(beats):
        return set()
    return {worker_id for worker_id, beat in lively.items() if beat.phase == "compute"}

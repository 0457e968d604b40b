"""Finds the worker that blocks a gang without progress, from the heartbeats of its workers.

Pure functions. No conclusion is drawn from a missing heartbeat.
"""

from __future__ import annotations

from collections.abc import Mapping

from elasticflow_airflow.engines.job_files import Heartbeat

_WAITING = ("reduce", "wait")


def find_hung(beats: Mapping[str, Heartbeat | None], *, limit_s: float, only_silent: bool) -> set[str]:
    """Return the workers that block the others; empty if none can be singled out, or none would be left.

    These are the workers silent for ``limit_s`` seconds while another one still reports that it waits. If none is
    silent, and ``only_silent`` is False, they are those that still compute while others wait. The workers' timestamps
    are only compared with each other, so that a machine that slept makes no worker suspect.
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

"""Which worker of a gang that makes no step holds the others up, by the heartbeats of its workers.

Pure functions. What a heartbeat that is missing means nobody can tell.
"""

from __future__ import annotations

from collections.abc import Mapping

from elasticflow_airflow.engines.job_files import Heartbeat

_WAITING = ("reduce", "wait")


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

"""Estimates when a job ends at the latest, from the variation of its speed. Pure arithmetic on a job's story."""

from __future__ import annotations

from statistics import fmean

from elasticflow_airflow.api.insight import JobStory

_ENOUGH = 20
"""Fewer measurements do not allow an estimate of the tail."""
_TAIL = 0.05


def latest_finish_at(story: JobStory, now: float) -> float | None:
    """Return when the remaining work would be done at the speed that 95 % of the measurements exceeded, in UTC s.

    Uses measurements with the job's current number of workers; the projection is based on their mean. None if the job
    has ended, nothing is projected, or there are too few measurements.
    """
    status = story.status
    if status.state.terminal or status.projected_finish_at is None or status.projected_finish_at <= now:
        return None
    speeds = sorted(
        one.steps_per_s for one in story.samples if one.steps_per_s and one.workers == status.workers and status.workers
    )
    if len(speeds) < _ENOUGH:
        return None
    slow = speeds[int(_TAIL * len(speeds))]
    return now + (status.projected_finish_at - now) * max(1.0, fmean(speeds) / slow)

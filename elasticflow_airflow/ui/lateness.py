"""When a job ends at the latest, by how its speed has varied. Pure arithmetic on a job's story."""

from __future__ import annotations

from statistics import fmean

from elasticflow_airflow.api.insight import JobStory

_ENOUGH = 20
"""Fewer measurements say nothing about their tail."""
_TAIL = 0.05


def latest_finish_at(story: JobStory, now: float) -> float | None:
    """When the work that is left would be done at a speed that 95 % of the measurements exceeded, in UTC s.

    Measurements with the workers that the job has now; the projection stands on their mean. None: it has ended, nothing
    is projected, or there are too few of them.
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

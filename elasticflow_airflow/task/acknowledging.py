"""Acknowledges the job of a task that succeeded, or cancels that of one that failed, once Airflow has recorded it.

A success is acknowledged here and never in ``execute()``: a task killed between the acknowledgement and Airflow's own
record would train twice. When a task has failed for good, its job is cancelled here, because Airflow does not call
``on_kill`` then. Runs in the task's process (and in the process of ``dag.test()``).
"""

from __future__ import annotations

from typing import Any

from airflow.listeners import hookimpl


@hookimpl  # type: ignore[untyped-decorator, unused-ignore]  # pluggy's marker carries no types in every version
def on_task_instance_success(previous_state: Any, task_instance: Any) -> None:  # noqa: ARG001 - pluggy goes by name
    """Acknowledge the job of an elastic task, so that the next submit starts a new training."""
    job = _owned_job(task_instance)
    if job is not None:
        task_instance.task.log.info("%s", job.acknowledge())


@hookimpl  # type: ignore[untyped-decorator, unused-ignore]  # as above
def on_task_instance_failed(previous_state: Any, task_instance: Any, error: Any) -> None:  # noqa: ARG001 - as above
    """Cancel the job of a task that will not be retried."""
    job = _owned_job(task_instance)
    state = getattr(task_instance, "state", None)
    if job is not None and getattr(state, "value", state) == "failed":
        task_instance.task.log.info("%s", job.cancel("the Airflow task failed and will not be tried again"))


def _owned_job(task_instance: Any) -> Any:
    """Return the LeasedJob of an elastic task; None for any other task (the API server passes its own rows)."""
    return getattr(getattr(task_instance, "task", None), "elasticflow_job", None)

"""Tasks in front of a scripted service: a context as Airflow gives one, and the status of a success."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pendulum


class Store(dict):
    """Airflow's task state store."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value


def context_of(
    task: Any, store: Store | None = None, *, dag_test: bool = False, try_number: int = 1, **more: Any
) -> dict:
    dag_run = SimpleNamespace(
        run_after=pendulum.now("UTC"),
        run_type="scheduled",
        triggering_user_name="dag_test" if dag_test else None,
        clear_number=0,
    )
    ti = SimpleNamespace(
        dag_id="daily", run_id="run1", task_id=task.task_id, map_index=-1, try_number=try_number, max_tries=0
    )
    store = Store() if store is None else store
    found = {"ti": ti, "task": task, "dag": task.dag, "dag_run": dag_run, "run_id": "run1", "task_state_store": store}
    return {**found, **more}


def success(make_status: Any, **changes: Any) -> Any:
    from elasticflow_airflow.wire import JobResult, State

    result = JobResult(
        steps=10, final_loss=0.25, met=True, slack_s=60.0, finished_at=time.time(), checkpoint_path="/c",
        checkpoint_digest="d1",
    )  # fmt: skip
    return make_status(State.SUCCEEDED, step=10, result=result, **changes)

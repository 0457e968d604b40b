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


_NOBODY_TO_ASK: Any = object()


def context_of(
    task: Any,
    store: Store | None = None,
    *,
    dag_test: bool = False,
    try_number: int = 1,
    max_tries: int = 0,
    map_index: int = -1,
    run_after: Any = None,
    began: Any = None,
    run_type: str = "scheduled",
    state: Any = _NOBODY_TO_ASK,
    **more: Any,
) -> dict:
    """``state`` is what Airflow's API says of the task: None when its run was deleted, an error to raise it."""

    def get_task_states(dag_id, task_ids, run_ids, map_index):
        if isinstance(state, Exception):
            raise state
        name = task_ids[0] if map_index < 0 else f"{task_ids[0]}_{map_index}"
        return {} if state is None else {run_ids[0]: {name: state}}

    dag_run = SimpleNamespace(
        run_after=run_after or pendulum.now("UTC"),
        start_date=began or run_after or pendulum.now("UTC"),
        run_type=run_type,
        triggering_user_name="dag_test" if dag_test else None,
        clear_number=0,
    )
    ti = SimpleNamespace(
        dag_id="daily",
        run_id="run1",
        task_id=task.task_id,
        map_index=map_index,
        try_number=try_number,
        max_tries=max_tries,
    )
    if state is not _NOBODY_TO_ASK:
        ti.get_task_states = get_task_states
    store = Store() if store is None else store
    found = {"ti": ti, "task": task, "dag": task.dag, "dag_run": dag_run, "run_id": "run1", "task_state_store": store}
    return {**found, **more}


def success(make_status: Any, **changes: Any) -> Any:
    from elasticflow_airflow.api import JobResult, State

    result = JobResult(
        steps=10, final_loss=0.25, met=True, slack_s=60.0, finished_at=time.time(), checkpoint_path="/c",
        checkpoint_digest="d1",
    )  # fmt: skip
    return make_status(State.SUCCEEDED, step=10, result=result, **changes)

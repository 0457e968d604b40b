"""Reads the states of tasks from Airflow in the triggerer, batched into one request per DAG run.

Each request passes through the triggerer's single connection to the database, which everything else there uses as well.
"""

from __future__ import annotations

import asyncio
from typing import Any

from asgiref.sync import sync_to_async

_GATHER_S = 0.2
_ANSWER_WITHIN_S = 15.0

_States = dict[str, Any]
_questions: dict[tuple[str, str], tuple[set[str], asyncio.Task[_States]]] = {}
"""Pending requests by DAG and run: the ids of the tasks to ask for, and the response."""


async def state_of(task_instance: Any) -> str | None:
    """Return the state of a task instance; None if it has none, or no longer exists.

    Raises TimeoutError, and whatever the connection to Airflow raises.
    """
    run = (str(task_instance.dag_id), str(task_instance.run_id))
    if run not in _questions:
        _questions[run] = (set(), asyncio.get_running_loop().create_task(_ask(*run)))
    task_ids, answer = _questions[run]
    task_ids.add(str(task_instance.task_id))
    states = await asyncio.shield(answer)
    index = -1 if task_instance.map_index is None else task_instance.map_index
    state = states.get(task_instance.task_id if index < 0 else f"{task_instance.task_id}_{index}")
    return None if state is None else str(getattr(state, "value", state))


async def _ask(dag_id: str, run_id: str) -> _States:
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    try:
        await asyncio.sleep(_GATHER_S)
    finally:
        task_ids, _ = _questions.pop((dag_id, run_id))
    ask = sync_to_async(RuntimeTaskInstance.get_task_states)
    answer = ask(dag_id=dag_id, task_ids=sorted(task_ids), run_ids=[run_id])
    states: dict[str, _States] = await asyncio.wait_for(answer, _ANSWER_WITHIN_S)
    return states.get(run_id, {})

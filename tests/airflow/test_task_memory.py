"""How long Airflow keeps what a task remembers, with its own accessor and with a store that knows of no retention."""

from __future__ import annotations

from uuid import uuid4

from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import SetTaskStateStore
from airflow.sdk.execution_time.context import TaskStateStoreAccessor
from airflow.sdk.state import TaskScope

from elasticflow_airflow.waiting.task_memory import TaskMemory

DEADLINES = {"deadline": {"given": "07:30", "at": 1.0}}


def test_a_deadline_is_remembered_for_good(monkeypatch):
    sent = []

    class Comms:
        def send(self, message):
            sent.append(message)

    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", Comms(), raising=False)
    scope = TaskScope(dag_id="d", run_id="r", task_id="t", map_index=-1)
    TaskMemory(deadlines=DEADLINES).save(TaskStateStoreAccessor(ti_id=uuid4(), scope=scope))
    (message,) = sent
    assert isinstance(message, SetTaskStateStore)
    assert message.expires_at is None
    assert message.value["deadlines"] == DEADLINES


def test_a_store_without_retention_will_do():
    kept = {}

    class Store:
        def get(self, key, default=None):
            return kept.get(key, default)

        def set(self, key, value):
            kept[key] = value

    TaskMemory(deadlines=DEADLINES).save(Store())
    assert TaskMemory.load(Store()).deadlines == DEADLINES

"""Airflow's part of the soak: tasks that train under deadlines, while its components and their workers are killed."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from typing import Any

import httpx
import psutil

from elasticflow_airflow.api import JobIdentity, State
from elasticflow_airflow.client import ElasticFlowClient, Endpoint
from support.airflow_paths import Paths
from support.airflow_stack import COMPONENTS, Stack, close_stack, open_stack

NAMESPACE = "soaked"
RETRIES = 50
STEPS = {"defers": 200, "blocks": 250, "promised": 150}
"""Of each task; one worker makes ten a second."""
_NOT_BEGUN = (None, "scheduled", "queued")
"""States of a task that Airflow has not given to anybody yet."""
_EASY = 'deadline=timedelta(minutes=20), on_past_deadline="best_effort", on_reject="best_effort"'
_TASKS = [
    f'train({STEPS["defers"]}, task_id="defers", retries={RETRIES})',
    f'blocking({STEPS["blocks"]}, task_id="blocks", retries={RETRIES}, {_EASY})',
    f'train({STEPS["promised"]}, task_id="promised", retries={RETRIES}, {_EASY})',
]


class SoakedAirflow:
    """An Airflow whose tasks train with a service that somebody else starts and kills. It has one DAG, ``dag_id``."""

    def __init__(self, endpoint: Endpoint, database: str, dag_id: str) -> None:
        paths = Paths()
        paths.add_dag(dag_id, *_TASKS, dag="schedule=None, max_active_runs=1000")
        connection = {"host": endpoint.base_url, "password": endpoint.token, "extra": {"namespace": NAMESPACE}}
        self.dag_id = dag_id
        self.stack: Stack = open_stack(
            paths.dag_file(),
            1,
            database=database,
            connections={"elasticflow_default": connection},
            # A service that is killed on a busy machine is away for longer than those of other tests.
            settings={"AIRFLOW__ELASTICFLOW__LEASE_S": "120", "AIRFLOW__ELASTICFLOW__ORPHAN_S": "600"},
        )

    def trigger(self) -> None:
        """Begin a run; nobody knows whether one did that was asked for in the moment of a kill."""
        self.stack.run(self.dag_id)

    def disturb(self, chance: random.Random) -> None:
        """Kill a component, or the process that runs a task, and start what no executor starts."""
        running = [t for t in self.stack.tasks.values() if t["state"] == "running" and t.get("pid")]
        if running and chance.random() < 0.3:
            try:
                runner = psutil.Process(chance.choice(running)["pid"])
                supervisor = runner.parent()
                runner.kill()
                if supervisor is not None and chance.random() < 0.5:
                    supervisor.kill()
            except psutil.NoSuchProcess:
                pass  # it left its worker meanwhile
            return
        component = chance.choice(COMPONENTS)
        self.stack.kill(component, signal.SIGKILL)
        time.sleep(chance.uniform(0.0, 10.0))
        self.stack.start(component)

    def finish(self) -> None:
        """Wait until all runs have ended; :meth:`judge` says what is wrong with those that have not."""
        end = time.monotonic() + 900
        while time.monotonic() < end and self._states() & {"queued", "running"}:
            time.sleep(5.0)

    def judge(self, client: ElasticFlowClient) -> list[str]:
        """What is not as it must be, a line each: every task succeeded, each by one training that kept its promise."""
        wrong = []
        for run in self._runs():
            tasks = self.stack.do("GET", f"{self._path}/{run['dag_run_id']}/taskInstances").json()["task_instances"]
            for task in tasks:
                where = f"{self.dag_id}, {run['dag_run_id']}, {task['task_id']}"
                if task["start_date"] is None and task["state"] in _NOT_BEGUN:
                    # A scheduler that was killed at the wrong moment may never look at it again.
                    print(f"Airflow has never begun {where}: {task['state']}")
                    continue
                identity = JobIdentity(
                    namespace=NAMESPACE, dag_id=self.dag_id, run_id=run["dag_run_id"], task_id=task["task_id"]
                )
                events = client.events(identity.job_id)
                kinds = Counter(event.kind for event in events)
                status = client.status(identity.job_id)
                story = "; ".join(f"{event.at:.1f} {event.kind}: {event.reason}" for event in events)
                story = f"Airflow's own: {self._told(task)}; the service's: {story}"
                if task["state"] != "success":
                    wrong.append(f"{where} is {task['state']} after {task['try_number']} tries: {story}")
                if (status.state, status.step) != (State.SUCCEEDED, STEPS[task["task_id"]]):
                    wrong.append(f"{where} is {status.state} at step {status.step}: {story}")
                elif not kinds["submitted"] == kinds["succeeded"] == status.incarnation == 1:
                    wrong.append(f"{where} was not trained once: {story}")
                elif not status.best_effort and not (status.result and status.result.met):
                    wrong.append(f"{where} was promised, and not kept: {story}")
        return wrong

    def close(self) -> None:
        close_stack(self.stack)

    def _told(self, task: dict[str, Any]) -> str:
        """What Airflow says of a task: its tries, and what was done to it by whom."""
        if (task["state"], task["try_number"]) == ("success", 1):
            return "one try"
        where = f"{self._path}/{task['dag_run_id']}/taskInstances/{task['task_id']}/tries"
        tries = self.stack.do("GET", where).json()["task_instances"]
        asked = {"dag_id": self.dag_id, "run_id": task["dag_run_id"], "task_id": task["task_id"], "limit": 1000}
        logs = self.stack.do("GET", "/api/v2/eventLogs", params=asked).json()["event_logs"]
        return "; ".join(
            [f"try {t['try_number']} {t['state']} {t['start_date']} to {t['end_date']}" for t in tries]
            + [f"{log['when']} {log['event']} by {log['owner']}: {log['extra']}" for log in logs]
        )

    @property
    def _path(self) -> str:
        return f"/api/v2/dags/{self.dag_id}/dagRuns"

    def _runs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:  # Airflow gives 100 at most.
            page = self.stack.do("GET", self._path, params={"limit": 100, "offset": len(found)}).json()
            found += page["dag_runs"]
            if not page["dag_runs"] or len(found) >= page["total_entries"]:
                return found

    def _states(self) -> set[str]:
        try:
            return {run["state"] for run in self._runs()}
        except httpx.TransportError:
            return {"running"}  # who answers was just killed

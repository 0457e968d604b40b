"""What a kill of a running task means for its job: who wants the task dead, a user or only the machine it runs on.

Airflow sends the same SIGTERM when a user marks the task failed, clears it or deletes its run, and when a worker is
shut down (a deploy, an eviction), which is nobody's wish to stop the training. So the task asks Airflow for its own
state. Talks to Airflow through the supervisor of the task's process.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import pendulum
from airflow.sdk.exceptions import AirflowException, AirflowRescheduleException, AirflowTaskTimeout

from elasticflow_airflow.waiting.dag_test_leases import LeasedJob

KILL_WITHIN_S = 4.0
"""Airflow sends SIGKILL five seconds after SIGTERM."""

_NOT_WANTED = frozenset({"failed", "success", "skipped", "upstream_failed", "removed", "restarting"})
"""States that a user gave a task that runs; ``restarting``: it was cleared. In every other one an attempt is there or
will come, and goes on with the job."""


class Kill:
    """The kill of this process' task, if there was one: set from the signal handler, read by whoever waits."""

    def __init__(self) -> None:
        self.happened = False
        self._still_wanted = True  # until Airflow says otherwise
        self._settled: threading.Event | None = None  # made when needed: Airflow copies operators

    def strike(
        self,
        task_instance: Any,
        find_job: Callable[[], LeasedJob | None],
        log: Any,
        execution_timeout: timedelta | None,
    ) -> None:
        """Cancel the job unless only this worker is shut down. Where Airflow cannot be asked, the job is left alone.

        It cannot when its API server is restarted: the supervisor ends a task whose heartbeat nobody takes.

        Settled in a thread: this is called by a signal handler, and what it interrupted may hold the lock of the line
        to Airflow.
        """
        settled = self._settled = threading.Event()
        self.happened = True
        timed_out = isinstance(sys.exception(), AirflowTaskTimeout)  # Airflow calls on_kill then, too

        def settle() -> None:
            try:
                wanted = False if timed_out else still_wanted(task_instance, log)
                self._still_wanted = wanted is not False
                job = find_job() if wanted is False else None
                if job is not None:
                    over = f"execution_timeout ({execution_timeout}) is over"
                    why = over if timed_out else "the Airflow task was killed"
                    log.warning("%s", job.cancel(why, within_s=KILL_WITHIN_S))
            finally:
                settled.set()

        thread = threading.Thread(target=settle, name="elasticflow-kill")
        thread.start()
        thread.join(KILL_WITHIN_S)

    def end(self, what: str, pause_s: float, log: Any) -> NoReturn:
        """End this process' part: never as a success, and without spending a retry unless a user ended the task.

        Who asks for another worker wakes no task that Airflow has recorded as ended. Raises AirflowRescheduleException,
        ``pause_s`` from now, or AirflowException.
        """
        if self._settled is not None:
            self._settled.wait(KILL_WITHIN_S)
        if not self._still_wanted:
            raise AirflowException(f"the task was killed {what}")
        log.warning("this worker is shut down %s: the task goes on in another one in %g s", what, pause_s)
        come_back(pause_s)


def come_back(after_s: float) -> NoReturn:
    """Give the worker slot back, and ask for another one after a while. No retry is spent on it."""
    raise AirflowRescheduleException(pendulum.now("UTC").add(seconds=after_s))  # type: ignore[no-untyped-call]  # no types


def still_wanted(task_instance: Any, log: Any) -> bool | None:
    """Whether Airflow wants this task to run on, here or elsewhere; None when it cannot be asked.

    Never raises: it is called while a process is killed, when its supervisor may be gone.
    """
    try:
        states = task_instance.get_task_states(
            dag_id=task_instance.dag_id,
            task_ids=[task_instance.task_id],
            run_ids=[task_instance.run_id],
            map_index=-1 if task_instance.map_index is None else task_instance.map_index,
        )
    except Exception as error:  # noqa: BLE001 - whatever the broken line to the supervisor raises
        log.warning("Airflow could not be asked why this task is killed (%s: %s)", type(error).__name__, error)
        return None
    found = list(states.get(task_instance.run_id, {}).values())
    if not found:
        return False  # its run, or its DAG, was deleted
    return getattr(found[0], "value", found[0]) not in _NOT_WANTED

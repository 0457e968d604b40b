"""Decides what a kill of a running task means for its job: a user ended the task, or only the worker is shut down.

Airflow sends the same SIGTERM when a user marks the task failed, clears it or deletes its run, and when a worker is
shut down (a deploy, an eviction), which must not stop the training. So the task asks Airflow for its own state. Talks
to Airflow through the supervisor of the task's process.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import pendulum
from airflow.sdk.exceptions import AirflowException, AirflowRescheduleException, AirflowTaskTimeout

from elasticflow_airflow.waiting.leased_jobs import LeasedJob

KILL_WITHIN_S = 4.0
"""Airflow sends SIGKILL five seconds after SIGTERM."""

_NOT_WANTED = frozenset({"failed", "success", "skipped", "upstream_failed", "removed", "restarting"})
"""States that a user has set on a running task; ``restarting``: it was cleared. In any other state an attempt exists or
will follow, and continues with the job."""


class Kill:
    """The kill of this process's task, if there was one: set by the signal handler, read by the waiting code."""

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
        """Cancel the job unless only this worker is shut down. If Airflow cannot be asked, leave the job alone.

        That is so while Airflow's API server restarts: the supervisor ends a task whose heartbeats are not accepted.

        The work is done in a thread: a signal handler calls this, and the code that it interrupted may hold the lock of
        the connection to Airflow.
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
        """End this process's execution: never as a success, and without using up a retry unless a user ended the task.

        Asking for another worker does not wake a task that Airflow has recorded as ended. Raises
        AirflowRescheduleException, for ``pause_s`` seconds from now, or AirflowException.
        """
        if self._settled is not None:
            self._settled.wait(KILL_WITHIN_S)
        if not self._still_wanted:
            raise AirflowException(f"the task was killed {what}")
        log.warning("this worker is shut down %s: the task goes on in another one in %g s", what, pause_s)
        come_back(pause_s)


def come_back(after_s: float) -> NoReturn:
    """Release the worker slot, and reschedule the task in ``after_s`` seconds. Does not use up a retry."""
    raise AirflowRescheduleException(pendulum.now("UTC").add(seconds=after_s))  # type: ignore[no-untyped-call]  # no types


def still_wanted(task_instance: Any, log: Any) -> bool | None:
    """Whether Airflow wants this task to continue, here or elsewhere; None if Airflow cannot be asked.

    Never raises: it is called while the process is being killed, when its supervisor may be gone.
    """
    try:
        states = task_instance.get_task_states(
            dag_id=task_instance.dag_id,
            task_ids=[task_instance.task_id],
            run_ids=[task_instance.run_id],
            map_index=-1 if task_instance.map_index is None else task_instance.map_index,
        )
    except Exception as error:  # noqa: BLE001 - whatever the broken connection to the supervisor raises
        log.warning("Airflow could not be asked why this task is killed (%s: %s)", type(error).__name__, error)
        return None
    found = list(states.get(task_instance.run_id, {}).values())
    if not found:
        return False  # its run, or its DAG, was deleted
    return getattr(found[0], "value", found[0]) not in _NOT_WANTED

"""Cancels the job of a deferred task that was killed, even if its trigger ends meanwhile.

Airflow's triggerer cancels an abandoned trigger again each second until it has ended, so ``on_kill()`` has only that
long. The cancellation therefore runs in its own asyncio task, which only a triggerer shutdown cancels. In that case the
report of owners (``owner_report``) ends the job, or finally the expiry of its lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from elasticflow_airflow.api import State
from elasticflow_airflow.client import ElasticFlowError, JobNotFound, StaleClaim
from elasticflow_airflow.exceptions import ServiceAway
from elasticflow_airflow.waiting.leased_jobs import ENDED_LATER
from elasticflow_airflow.waiting.retrying_client import RetryingClient
from elasticflow_airflow.waiting.task_states import state_of

_KILLED = "user-action"
"""The cancel message that Airflow's triggerer passes to a trigger that is no longer needed."""
_REASON = "the deferred Airflow task was killed"
_PAUSE_S = 1.0

_under_way: set[asyncio.Task[None]] = set()
"""Strong references, because an event loop does not keep tasks alive."""


def go_on(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a coroutine in a task that outlives the caller."""
    task = asyncio.get_running_loop().create_task(work)
    _under_way.add(task)
    task.add_done_callback(_under_way.discard)
    return task


def under_way() -> frozenset[asyncio.Task[None]]:
    """Return the tasks of ``go_on`` that are still running in this process."""
    return frozenset(_under_way)


def is_kill(cancelled: asyncio.CancelledError) -> bool:
    """Whether Airflow cancels the trigger because it is no longer needed, while the triggerer keeps running."""
    return _KILLED in cancelled.args


async def cancel_job(service: RetryingClient, job_id: str, claim: int, task_instance: Any, log: Any) -> None:
    """Cancel a job, retrying while the service is unavailable; log the result and close the client."""
    try:
        if await _waits_elsewhere(task_instance, log):
            log.info("job %s is not cancelled: its task waits in another triggerer", job_id)
            return
        tries = 0
        while (status := await service.ask(lambda client: client.cancel(job_id, claim, _REASON))) is None:
            tries += 1
            log.warning("job %s is not cancelled yet after %d tries; trying again", job_id, tries)
            await asyncio.sleep(_PAUSE_S)
        if status.state.terminal and status.state is not State.CANCELLED:
            log.info("job %s is %s already: nothing to cancel", job_id, status.state.value)
        else:
            log.info("job %s cancelled, because the task was killed", job_id)
    except StaleClaim:
        log.info("job %s belongs to a newer attempt by now: not cancelled", job_id)
    except JobNotFound:
        log.info("job %s is not known to the service any more", job_id)
    except (ElasticFlowError, ServiceAway) as error:
        log.warning("job %s could not be cancelled (%s): it ends without an owner", job_id, error)
    except asyncio.CancelledError:
        log.warning("this triggerer leaves before job %s was cancelled; %s", job_id, ENDED_LATER)
        raise
    finally:
        await service.aclose()


async def _waits_elsewhere(task_instance: Any, log: Any) -> bool:
    """Whether the task is still deferred, in another triggerer that took it over because this one missed heartbeats.

    Airflow then cancels the trigger here as if a user had ended the task. If Airflow cannot be asked, assume the
    latter.
    """
    if task_instance is None:
        return False
    try:
        return await state_of(task_instance) == "deferred"
    except Exception as error:  # noqa: BLE001 - whatever the connection to the supervisor raises; the job is cancelled
        log.warning("Airflow could not be asked for the task's state (%s: %s)", type(error).__name__, error)
        return False

"""Cancels the job of a deferred task that was killed, whatever becomes of its trigger meanwhile.

Airflow's triggerer cancels a trigger that nobody waits for again each second, until it has ended: ``on_kill()`` has
that long. So the cancel goes on in a task of its own, which nobody cancels but a triggerer that leaves. What it leaves
behind, the report of owners ends (``owner_report``), and last of all the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from elasticflow_airflow.api import State
from elasticflow_airflow.client import ElasticFlowError, JobNotFound, StaleClaim
from elasticflow_airflow.exceptions import ServiceAway
from elasticflow_airflow.waiting.dag_test_leases import ENDED_LATER
from elasticflow_airflow.waiting.retrying_client import RetryingClient
from elasticflow_airflow.waiting.task_states import state_of

_KILLED = "user-action"
"""What Airflow's triggerer says to a trigger that nobody waits for any more."""
_REASON = "the deferred Airflow task was killed"
_PAUSE_S = 1.0

_under_way: set[asyncio.Task[None]] = set()
"""An event loop keeps no task alive."""


def go_on(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Do something that outlasts the caller."""
    task = asyncio.get_running_loop().create_task(work)
    _under_way.add(task)
    task.add_done_callback(_under_way.discard)
    return task


def under_way() -> frozenset[asyncio.Task[None]]:
    """What goes on by itself in this process."""
    return frozenset(_under_way)


def is_kill(cancelled: asyncio.CancelledError) -> bool:
    """Whether Airflow takes the trigger away because nobody waits for it; its process goes on."""
    return _KILLED in cancelled.args


async def cancel_job(service: RetryingClient, job_id: str, claim: int, task_instance: Any, log: Any) -> None:
    """Cancel a job, and try again while the service is away; close the client. Says in the log what came of it."""
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
    """Whether the task is still deferred: another triggerer has taken it over, as this one was not heard for a while.

    Airflow then takes the trigger away here as if somebody had ended the task. Where it cannot be asked, somebody did.
    """
    if task_instance is None:
        return False
    try:
        return await state_of(task_instance) == "deferred"
    except Exception as error:  # noqa: BLE001 - whatever the line to the supervisor raises; the job is cancelled then
        log.warning("Airflow could not be asked for the task's state (%s: %s)", type(error).__name__, error)
        return False

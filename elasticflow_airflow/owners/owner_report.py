"""Reports to the service the status of the task instances that own its jobs, according to Airflow's database.

An owner is gone only if it has ended for good or was deleted: a task that will be retried, that waits for its next poke
or was cleared, still finds its job. The claims are read before the database, so that a report on one attempt never ends
the job of the next attempt. Requires access to Airflow's metadata database, so it does not run in a task.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from elasticflow_airflow.api import JobIdentity
from elasticflow_airflow.api.owners import OwnedJob, OwnedJobs, OwnerSeen, OwnersReport
from elasticflow_airflow.client import ElasticFlowClient
from elasticflow_airflow.recurring.calendar_feed import chunks

if TYPE_CHECKING:
    from sqlalchemy import URL
    from sqlalchemy.orm import Session

TaskKey = tuple[str, str, str, int]
"""DAG, run, task and map index."""
States = Mapping[TaskKey, str | None]
"""States of the existing task instances; None: it has no state, as after a clear."""

ENDED = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
"""States that no further attempt follows, unless the task is cleared."""
_SILENT_S = 30.0
_KEYS_AT_ONCE = 200


def report_owners(
    client: ElasticFlowClient, namespace: str, airflow: str, find: Callable[[Sequence[TaskKey]], States]
) -> list[str]:
    """List the live jobs of a namespace, look up their task instances, and report which are gone.

    Returns the jobs that are cancelled. ``airflow`` is the name of this Airflow; ``find`` looks up the states of
    existing task instances.
    """
    cancelled: list[str] = []
    after: str | None = ""
    while after is not None:
        page = client.owned_jobs(namespace, after)
        states = find([task_key(job.identity) for job in page.jobs]) if page.jobs else {}
        if owners := list(_seen(page, states, airflow)):
            report = OwnersReport(namespace=namespace, airflow=airflow, owners=owners)
            cancelled += client.report_owners(report).cancelled
        after = page.next_after
    return cancelled


def task_key(identity: JobIdentity) -> TaskKey:
    """Return the key of the task instance that owns a job."""
    return identity.dag_id, identity.run_id, identity.task_id, identity.map_index


def find_states(session: Session, keys: Sequence[TaskKey]) -> dict[TaskKey, str | None]:
    """Look up the states of the task instances that exist. Read-only."""
    from airflow.models.taskinstance import TaskInstance
    from sqlalchemy import select, tuple_

    columns = (TaskInstance.dag_id, TaskInstance.run_id, TaskInstance.task_id, TaskInstance.map_index)
    found: dict[TaskKey, str | None] = {}
    for some in chunks(keys, _KEYS_AT_ONCE):
        query = select(*columns, TaskInstance.state).where(tuple_(*columns).in_(some))
        for dag_id, run_id, task_id, map_index, state in session.execute(query):
            found[dag_id, run_id, task_id, map_index] = None if state is None else str(getattr(state, "value", state))
    return found


def name_of_airflow(database: URL) -> str:
    """Return a name for the Airflow of a metadata database: stable while the database stays in place, and opaque."""
    host = database.host or ""
    if host in ("", "localhost", "127.0.0.1", "::1"):
        host = f"{socket.gethostname()}/{host}"
    where = [database.get_backend_name(), host, str(database.port or ""), database.database or ""]
    return hashlib.sha256("\0".join(where).encode()).hexdigest()[:16]


def _seen(page: OwnedJobs, states: States, airflow: str) -> Iterator[OwnerSeen]:
    for job in page.jobs:
        key = task_key(job.identity)
        state = states.get(key)
        if key not in states:
            if job.known_to == airflow:  # absence means nothing for a task instance that was never here
                yield OwnerSeen(job_id=job.job_id, claim=job.claim, owner="deleted")
        elif state in ENDED:
            yield OwnerSeen(job_id=job.job_id, claim=job.claim, owner="ended", state=str(state))
        elif job.known_to != airflow or _is_silent(job, page.at):
            yield OwnerSeen(job_id=job.job_id, claim=job.claim, owner="there", state=state or "")


def _is_silent(job: OwnedJob, now: float) -> bool:
    """Whether the job was not polled for a while, and Airflow has not reported that its task exists either."""
    return all(at is None or now - at > _SILENT_S for at in (job.heard_at, job.seen_at))

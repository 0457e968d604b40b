"""Waits in the triggerer until Airflow's scheduler has completed a loop iteration, by its heartbeat in the health page.

Airflow fails a task that resumes before its scheduler has read the executor's report of the first part ("state
mismatch"). The scheduler reads reports in each iteration of its loop and updates its heartbeat after that: once two
different heartbeats were seen after the worker exited, the report has been read. With several schedulers, that need not
be the scheduler in question. If Airflow cannot be asked, there is no wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime

import httpx
from airflow.sdk.configuration import conf

log = logging.getLogger(__name__)

_PATH = "/api/v2/monitor/health"
_WORKER_LEAVES_S = 2.0
"""How long a worker may take to exit after its task was deferred."""
_LOOK_EVERY_S = 2.0
_LIMIT_S = 60.0
"""Maximum wait: a scheduler that was stalled for longer reads the report before it does anything else."""
_ANSWER_WITHIN_S = 5.0


class SchedulerRounds:
    """Polls the heartbeat of Airflow's scheduler, at most every two seconds for all callers together."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._asking = asyncio.Lock()
        self._looked_s = float("-inf")
        self._heartbeat_at: float | None = None

    async def wait(self, since_at: float) -> None:
        """Wait until the scheduler has completed an iteration since ``since_at`` (UTC seconds).

        Returns early after a minute, or if the heartbeat is not available.
        """
        end_s, first = time.monotonic() + _LIMIT_S, None
        while time.monotonic() < end_s:
            heartbeat_at = await self._look()
            if heartbeat_at is None:
                return
            if heartbeat_at > since_at + _WORKER_LEAVES_S:
                if first is not None and heartbeat_at > first:
                    return
                first = first or heartbeat_at
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _look(self) -> float | None:
        """Return the scheduler's last heartbeat (UTC seconds); None if it is not available."""
        async with self._asking:
            if time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
                self._heartbeat_at = await self._ask()
                self._looked_s = time.monotonic()
            return self._heartbeat_at

    async def _ask(self) -> float | None:
        try:
            async with httpx.AsyncClient(timeout=_ANSWER_WITHIN_S) as http:
                answer = await http.get(self._url)
            answer.raise_for_status()
            told = answer.json()["scheduler"]["latest_scheduler_heartbeat"]
            return None if told is None else datetime.fromisoformat(told).timestamp()
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            log.debug("Airflow does not tell how its scheduler is (%s: %s)", type(error).__name__, error)
            return None


_rounds: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, SchedulerRounds] = weakref.WeakKeyDictionary()


def scheduler_rounds() -> SchedulerRounds:
    """Return the instance of the running event loop."""
    return _rounds.setdefault(asyncio.get_running_loop(), SchedulerRounds(health_url()))


def health_url() -> str:
    """Return the URL of the API server's health page, derived as Airflow's workers derive the server's address."""
    base = str(conf.get("api", "base_url", fallback="") or "/")
    if base.startswith("/"):
        base = f"http://localhost:8080{base}"
    server = str(conf.get("core", "execution_api_server_url", fallback="") or f"{base.rstrip('/')}/execution/")
    return server.rstrip("/").removesuffix("/execution") + _PATH


@asynccontextmanager
async def held_back(at_least_s: float) -> AsyncIterator[None]:
    """Make the context last at least ``at_least_s`` seconds, and until a scheduler iteration ends. 0: no delay."""
    if not at_least_s:
        yield
        return
    began_s = time.monotonic()
    settling = asyncio.create_task(scheduler_rounds().wait(time.time()))
    try:
        yield
        await asyncio.sleep(max(0.0, at_least_s - (time.monotonic() - began_s)))
        await settling
    finally:
        settling.cancel()

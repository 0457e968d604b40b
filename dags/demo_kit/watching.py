"""Follows a run of the demo: what the service decides and how far the jobs are; prints it as lines."""

from __future__ import annotations

import re
import threading
import time
from datetime import datetime

from rich.console import Console

from demo_kit.layout import DemoPaths
from elasticflow_airflow.api import Event, JobStatus
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, Endpoint
from elasticflow_airflow.testing import JobOutcome

_LOOK_S, _PROGRESS_S = 0.5, 10.0
_STYLES = {"admitted": "green", "succeeded": "bold green", "resized": "cyan", "rejected": "red", "failed": "red"}
_QUIET = frozenset({"checkpoint", "acknowledged", "submitted", "length", "kept", "seed", "owner_gone", "waiting"})
"""Kept for the service's own log: they would hide what matters."""
_TOLD_BY_REASON = frozenset({"resized", "rescaled", "started", "measured", "initialised", "restarting", "worker lost"})
"""Kinds whose reason is a sentence that needs no heading."""
_UTC = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)?) UTC")


class Watcher:
    """Prints what is new at each look; remembers every job and event for the summary."""

    def __init__(self, layout: DemoPaths, endpoint: Endpoint, console: Console) -> None:
        self._root, self._endpoint, self._console = layout.root, endpoint, console
        self._began_at, self._progress_at = time.monotonic(), 0.0
        self._jobs: dict[str, JobStatus] = {}
        self._events: dict[str, list[Event]] = {}
        self._lock = threading.Lock()

    def follow(self) -> None:
        """Go on looking, from a thread of its own."""
        threading.Thread(target=self._look_often, daemon=True).start()

    def line(self, text: str, style: str | None = None) -> None:
        """Print a line with the time since the beginning."""
        elapsed = int(time.monotonic() - self._began_at)
        self._console.print(f"{elapsed // 60:2d}:{elapsed % 60:02d}  {text}", style=style)

    def readable(self, reason: str) -> str:
        """A reason with tasks' names for ids of jobs, local times of day, and paths from the output folder on."""
        for job_id, job in self._jobs.items():
            reason = reason.replace(job_id, job.identity.task_id)
        return _UTC.sub(lambda found: clock(datetime.fromisoformat(f"{found[1]}+00:00")), reason).replace(
            f"{self._root}/", ""
        )

    def outcomes_of(self, run_id: str) -> list[JobOutcome]:
        """What became of the jobs of a DAG run, by name of task."""
        jobs = [job for job in self._jobs.values() if job.identity.run_id == run_id]
        jobs.sort(key=lambda job: job.identity.task_id)
        return [JobOutcome(job, tuple(self._events[job.job_id])) for job in jobs]

    def look(self) -> None:
        """Print what has happened since the last look; nothing while no service answers."""
        if self._endpoint.socket_path is None or self._endpoint.socket_path.exists():
            try:
                with self._lock, ElasticFlowClient(self._endpoint, retry_for_s=0) as service:
                    self._look_at(service)
            except ElasticFlowError:
                return  # Not started yet, just leaving, or without a leader: the next look tells more.

    def _look_often(self) -> None:
        while True:
            self.look()
            time.sleep(_LOOK_S)

    def _look_at(self, service: ElasticFlowClient) -> None:
        if not self._jobs:
            for busy in {slot.busy for slot in service.health().slots if slot.busy}:
                self.line(f"slots are held by others ({busy}): the demo is slower, or cannot train", "yellow")
        self._jobs |= {job.job_id: job for job in service.list_jobs()}
        fresh: list[tuple[Event, JobStatus]] = []
        for job_id, job in self._jobs.items():
            known = self._events.setdefault(job_id, [])
            new = service.events(job_id, after=known[-1].event_id if known else 0)
            known += new
            fresh += [(event, job) for event in new if event.kind not in _QUIET]
        for event, job in sorted(fresh, key=lambda pair: pair[0].event_id):
            if what := self._said(event, job.job_id):
                self.line(f"  {job.identity.task_id:<18} {what}", _STYLES.get(event.kind))
        if time.monotonic() - self._progress_at >= _PROGRESS_S:
            self._progress_at = time.monotonic()
            for job in self._jobs.values():
                if job.step and not job.state.terminal:
                    loss = "" if job.loss is None else f", loss {job.loss:.3f}"
                    speed = f", {job.steps_per_s:.2f} steps/s" if job.steps_per_s else ""
                    spare = "" if job.slack_s is None else f", {_length(job.slack_s)} to spare"
                    workers = f"{job.workers} worker{'' if job.workers == 1 else 's'}"
                    done = f"step {job.step} of {job.total_steps or '?'}{loss}, {workers}{speed}{spare}"
                    self.line(f"  {job.identity.task_id:<18} {done}", "dim")

    def _said(self, event: Event, job_id: str) -> str:
        """What to print of an event: its reason, after its kind where that says more; nothing for a plan that changed.

        Before a job has started, only the last of its sizes counts.
        """
        known = self._events[job_id]
        later = known[known.index(event) + 1 :]
        if event.kind == "resized" and not self._trains(known[: known.index(event)]):
            if any(one.kind == "resized" for one in later) and not any(one.kind == "started" for one in later):
                return ""
            workers = event.data["workers"]
            because = event.reason.partition(": ")[2].partition(";")[0]
            if event.data["purpose"] == "train":
                because = "" if job_id in because else f": {self.readable(because)}"
                return f"starts with {workers} worker{'' if workers == 1 else 's'}{because}"
        reason = self.readable(event.reason)
        kind = event.kind.replace("_", " ")
        return reason if kind in _TOLD_BY_REASON or reason.startswith(kind) else f"{kind}: {reason}"

    @staticmethod
    def _trains(before: list[Event]) -> bool:
        """Whether a job trains after these events."""
        last = next((event.kind for event in reversed(before) if event.kind in ("started", "restarting")), None)
        return last == "started"


def _length(seconds: float) -> str:
    """A length of time, as the service writes it."""
    minutes, rest = divmod(round(abs(seconds)), 60)
    sign = "-" if seconds < 0 else ""
    return f"{sign}{minutes} min {rest} s" if minutes else f"{sign}{rest} s"


def clock(at: datetime) -> str:
    """A moment as local wall-clock time."""
    return at.astimezone().strftime("%H:%M:%S")

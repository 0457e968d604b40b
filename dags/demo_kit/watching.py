"""Follows a run of the demo: what Airflow tells, what the service decides, how far the jobs are; prints it as lines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rich.console import Console

from demo_kit.layout import Layout
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, Endpoint
from elasticflow_airflow.wire import Event, JobStatus, SlotStatus

PROGRESS_EVERY_S = 10.0
_STYLES = {"admitted": "green", "succeeded": "bold green", "resized": "cyan", "rejected": "red", "failed": "red"}
_QUIET = frozenset({"checkpoint", "acknowledged", "submitted", "length", "kept"})
"""Kept for the service's own log: they would hide what matters."""


@dataclass(slots=True)
class Watcher:
    """Prints what is new at each :meth:`look`; remembers every job and event for the summary."""

    layout: Layout
    console: Console
    began_at: float = field(default_factory=time.time)
    jobs: dict[str, JobStatus] = field(default_factory=dict)
    events: dict[str, list[Event]] = field(default_factory=dict)
    days: list[dict[str, Any]] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    """State of each day's DAG run, by day."""
    told_of_failure: bool = False
    _said_busy: bool = False
    _offset: int = 0
    _progress_at: float = 0.0

    def look(self) -> None:
        """Print what has happened since the last look."""
        for happening in self._happenings():
            self._tell(happening)
        try:
            self._look_at_service()
        except ElasticFlowError:
            return  # Not started yet, or just leaving: the next look tells more.

    def line(self, text: str, style: str | None = None) -> None:
        """Print a line with the time since the beginning."""
        elapsed = int(time.time() - self.began_at)
        self.console.print(f"{elapsed // 60:2d}:{elapsed % 60:02d}  {text}", style=style, highlight=False, markup=False)

    def task_of(self, job_id: str) -> str:
        """The task that a job belongs to."""
        return self.jobs[job_id].identity.task_id

    def readable(self, reason: str) -> str:
        """A reason with tasks' names for ids of jobs, and paths from the output folder on."""
        for job_id in self.jobs:
            reason = reason.replace(job_id, self.task_of(job_id))
        return reason.replace(f"{self.layout.root}/", "")

    def _happenings(self) -> Iterator[dict[str, Any]]:
        if not self.layout.happenings.exists():
            return
        with self.layout.happenings.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)

    def _tell(self, happening: dict[str, Any]) -> None:
        kind = happening["kind"]
        if kind == "database":
            self.line("Airflow is ready: its own database, in the output folder")
        elif kind == "day":
            self.days.append(happening)
            due = {name: clock(happening[name]) for name in ("quick_by", "publish_by")}
            self.console.print()
            self.line(f"Day {len(self.days)}: the run of {happening['day']}", "bold")
            self.line(
                f"  due: finetune_quick at {due['quick_by']}, publish (after finetune_thorough) at {due['publish_by']}"
            )
        elif kind == "day_end":
            self.states[happening["day"]] = happening["state"]
            self.line(f"the DAG run of {happening['day']} has ended: {happening['state']}", "bold")
        elif kind == "task" and happening["state"] != "running":
            failed = happening["state"] == "failed"
            self.line(f"task {happening['task']}: {happening['state']}", "red" if failed else "green")
            if failed:
                self.told_of_failure = True
                self.line(f"  {happening.get('error', '')}", "red")

    def _look_at_service(self) -> None:
        socket = self.layout.state_dir / "service.sock"
        if not socket.exists():
            return
        with ElasticFlowClient(Endpoint(socket_path=socket), retry_for_s=0) as service:
            if not self._said_busy:
                self._say_busy(service.health().slots)
            self.jobs.update({job.job_id: job for job in service.list_jobs()})
            new: list[Event] = []
            for job_id in self.jobs:
                known = self.events.setdefault(job_id, [])
                fresh = service.events(job_id, after=known[-1].event_id if known else 0)
                known += fresh
                new += fresh
        for event in sorted(new, key=lambda event: event.event_id):
            if event.kind not in _QUIET and event.job_id is not None:
                what = f"{event.kind}: {self.readable(event.reason)}"
                self.line(f"  #{event.event_id:<4}{self.task_of(event.job_id):<18} {what}", _STYLES.get(event.kind))
        if time.monotonic() - self._progress_at >= PROGRESS_EVERY_S:
            self._progress_at = time.monotonic()
            self._show_progress()

    def _say_busy(self, slots: Sequence[SlotStatus]) -> None:
        self._said_busy = True
        busy = [slot for slot in slots if slot.busy is not None]
        if busy:
            self.line(
                f"{len(busy)} of {len(slots)} slots are held by others on this machine ({busy[0].busy}): the demo is"
                " slower, or cannot train, until they are free",
                "yellow",
            )

    def _show_progress(self) -> None:
        for job in sorted(self.jobs.values(), key=lambda job: job.submitted_at):
            if job.state.terminal or not job.step:
                continue
            parts = [f"step {job.step}/{job.total_steps or '?'}"]
            if job.loss is not None:
                parts.append(f"loss {job.loss:.3f}")
            parts.append(f"{job.workers} {'worker' if job.workers == 1 else 'workers'}")
            if job.steps_per_s:
                parts.append(f"{job.steps_per_s:.2f} steps/s")
            if job.projected_finish_at and job.slack_s is not None:
                side = "early" if job.slack_s >= 0 else "late"
                parts.append(f"done at {clock(job.projected_finish_at)}, {abs(job.slack_s):.0f} s {side}")
            self.line(f"        {job.identity.task_id:<18} {', '.join(parts)}", "dim")


def clock(at: float) -> str:
    """UTC seconds as local wall-clock time."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")

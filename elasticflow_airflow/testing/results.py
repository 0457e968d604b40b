"""Results of a DAG run, for assertions: its state, its tasks, and the jobs that they trained. Values only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from elasticflow_airflow.api import Event, JobStatus, State
from elasticflow_airflow.times import duration

T = TypeVar("T")


class ByTask(Mapping[str, T], Generic[T]):
    """Values by task id, for mapped tasks by ``task[index]``. A KeyError lists the existing keys."""

    def __init__(self, what: str, values: Mapping[str, T]) -> None:
        self._what, self._values = what, dict(values)

    def __getitem__(self, task_id: str) -> T:
        try:
            return self._values[task_id]
        except KeyError:
            known = ", ".join(self._values) or "none"
            raise KeyError(f"no {self._what} of task {task_id!r}; there are: {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        """As a dict."""
        return repr(self._values)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """One task instance. ``returned`` is its return value (XCom), ``error`` what it raised in its last try."""

    task_id: str
    map_index: int
    state: str | None
    tries: int
    returned: Any = None
    error: str | None = None

    @property
    def key(self) -> str:
        """Key in ``DagResult.tasks``."""
        return self.task_id if self.map_index < 0 else f"{self.task_id}[{self.map_index}]"


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The job of an elastic task: everything that the service knows about it, and every event with its reason.

    Times are by the cluster's clock: simulated with the simulated engine.
    """

    status: JobStatus
    events: tuple[Event, ...] = field(repr=False)

    @property
    def state(self) -> State:
        """State of the job."""
        return self.status.state

    @property
    def verdict(self) -> str:
        """Decision of admission control: admitted, rejected, best_effort, renegotiated or undecided."""
        return self.status.verdict.decision

    @property
    def reason(self) -> str:
        """Reason of the verdict."""
        return self.status.verdict.reason

    @property
    def met(self) -> bool | None:
        """Whether the job met its deadline; None without a deadline, or when it has not succeeded."""
        return None if self.status.result is None else self.status.result.met

    @property
    def slack_s(self) -> float | None:
        """Seconds from the end of the job to its deadline; negative: late."""
        return self.status.slack_s

    @property
    def deadline(self) -> datetime | None:
        """Deadline of the job; None when it has none."""
        return _moment(self.status.deadline_at)

    @property
    def earliest_deadline(self) -> datetime | None:
        """For a rejected job: the earliest deadline that could have been guaranteed."""
        return _moment(self.status.verdict.earliest_deadline_at)

    @property
    def submitted(self) -> datetime:
        """Time of submission."""
        return datetime.fromtimestamp(self.status.submitted_at, UTC)

    @property
    def finished(self) -> datetime | None:
        """Time of success; None when the job has not succeeded."""
        return None if self.status.result is None else _moment(self.status.result.finished_at)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The successive numbers of workers."""
        sizes: list[int] = []
        for event in self.events:
            if event.kind in ("started", "rescaled") and sizes[-1:] != [event.data["workers"]]:
                sizes.append(int(event.data["workers"]))
        return tuple(sizes)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Metrics that the script reported at its end."""
        return {} if self.status.result is None else self.status.result.metrics

    @property
    def checkpoint_path(self) -> str | None:
        """Folder of the final checkpoint."""
        return None if self.status.result is None else self.status.result.checkpoint_path

    def kinds(self) -> list[str]:
        """Return the kinds of all events, in order."""
        return [event.kind for event in self.events]

    def story(self) -> str:
        """Return every event with its reason, one per line, with the time in seconds since submission."""
        since = self.status.submitted_at
        return "\n".join(f"{event.at - since:10.1f} s  {event.kind}: {event.reason}" for event in self.events)

    def summary(self) -> str:
        """Return a one-line summary of the job."""
        said = f"{self.verdict}, {self.state.value} at step {self.status.step}"
        if self.status.total_steps is not None:
            said += f" of {self.status.total_steps}"
        if self.sizes:
            said += f", workers {' → '.join(map(str, self.sizes))}"
        if self.slack_s is not None and self.state is State.SUCCEEDED:
            said += f", {duration(abs(self.slack_s))} {'before' if self.slack_s >= 0 else 'AFTER'} its deadline"
        return said


@dataclass(frozen=True, slots=True, kw_only=True)
class DagResult:
    """Result of a run. Its repr describes the whole run: write ``assert result.succeeded, result``."""

    dag_id: str
    run_id: str
    state: str
    tasks: ByTask[TaskOutcome]
    jobs: ByTask[JobOutcome]

    @property
    def succeeded(self) -> bool:
        """Whether the run succeeded."""
        return self.state == "success"

    def __repr__(self) -> str:
        """Return a line per task, followed by its error and, unless all went well, the events of its job."""
        lines = [f"{self.dag_id} · {self.run_id}: {self.state}"]
        width = max((len(key) for key in self.tasks), default=0)
        for key, task in self.tasks.items():
            tries = f", {task.tries} tries" if task.tries > 1 else ""
            lines.append(f"  {key:{width}}  {task.state or 'not run'}{tries}")
            job = self.jobs.get(key)
            if job is not None:
                lines.append(f"  {'':{width}}  job: {job.summary()}")
            if task.error and task.state != "success":
                lines += [f"      {line}" for line in task.error.splitlines()]
            if job is not None and (job.state is not State.SUCCEEDED or job.met is False):
                lines += [f"      {line}" for line in job.story().splitlines()]
        return "\n".join(lines)


def _moment(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)

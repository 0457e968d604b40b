"""Documents that are stored for a job: its verdict, costs, in-place changes, loss target and end."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from elasticflow_airflow.api import State
from elasticflow_airflow.api.status import AdmissionDecision
from elasticflow_airflow.scheduler_core.convergence import LossCurve
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service.store.documents.columns import StoredReason

NO_REASON = Reason("")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVerdict:
    """The last decision of admission control on a job. The API shows it as ``api.Verdict``."""

    decision: AdmissionDecision = "undecided"
    reason: StoredReason = NO_REASON
    deadline_at: float | None = None
    earliest_deadline_at: float | None = None
    event_id: int | None = None
    """The id of its event, set when the event is written (see ``NewEvent.is_verdict``)."""
    plan: list[dict[str, float]] | None = None
    """Segments of the plan that keeps the deadline, as ``scheduler_values.plan_to_json`` writes them."""
    limit: StoredReason = NO_REASON
    """What limits the number of workers apart from the cluster, as a sentence; the reason ends with it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end that was decided for a job. The job becomes terminal when its workers have left."""

    state: State
    reason: StoredReason
    failure: str | None = None
    use_checkpoint: bool = False
    """It succeeds with its last checkpoint, although its training was not done."""

    def __post_init__(self) -> None:
        if not self.state.terminal:
            raise ValueError(f"{self.state.value!r} is no state in which a job is over")

    @property
    def is_done(self) -> bool:
        """Whether its gang has finished and left. Workers still alive were only joining, and have nothing to save."""
        return self.state is State.SUCCEEDED and not self.use_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """Measured durations of starts, changes of workers and ends of a job, in seconds; None if not measured yet."""

    startup_s: float | None = None
    pause_s: float | None = None
    """The pause of a restart with other workers."""
    tail_s: float | None = None
    """From the last step until the job is terminal."""
    in_place_pause_s: float | None = None
    join_s: float | None = None
    """The time that workers need to join in place; the others train on meanwhile."""

    def known(self) -> dict[str, float]:
        """Return the measured costs, by name."""
        return {field.name: cost for field in fields(self) if (cost := getattr(self, field.name)) is not None}

    def updated(self, **measured_s: float) -> MeasuredCosts:
        """Return the costs to plan with after another measurement: a higher value counts in full, a lower one by half.

        A far higher value is capped, so that a single outlier does not keep a task out for days.
        """
        before = self.known()
        return replace(self, **{name: _blend(before.get(name, cost), cost) for name, cost in measured_s.items()})


def _blend(before_s: float, measured_s: float) -> float:
    believed_s = min(measured_s, max(3.0 * before_s, before_s + 60.0))
    return max(believed_s, (before_s + believed_s) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """Facts about the last run of a recurring task; its next runs are expected to be like it."""

    signature: str = ""
    """The key of its history; see ``task_history.signature_of``."""
    scaling_curve: dict[int, float] | None = None
    """Steps/s by number of workers, if its submission gave them."""
    min_workers: int = 1
    max_workers: int | None = None
    logical_workers: int | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the samples of a training are thinned, and the last reports of its workers apart from its progress."""

    number: int | None = None
    """The number of the last sample; None if there is none yet. Kept samples have multiples of ``stride``."""
    at: float = 0.0
    """The time of the last sample, in UTC seconds."""
    workers: int | None = None
    """The number of workers at the last sample."""
    stride: int = 1
    """Doubles when there are too many samples; every second sample is deleted then."""
    noise_scale: float | None = None
    samples_per_s: float | None = None
    refused: tuple[str, ...] = ()
    """Fields of reports that were out of bounds and about which the owner has been warned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmendmentAnswer:
    """The answer to an amendment, by the loop unless the job has ended; the API shows it as ``AmendAnswer``."""

    accepted: bool
    reason: StoredReason
    earliest_deadline_at: float | None = None
    for_next_attempt: bool = False
    """The job had ended, so what was asked for applies to its later attempts."""


@dataclass(frozen=True, slots=True)
class InPlaceRecord:
    """The record of a job's in-place changes, which need no restart."""

    able: bool | None = None
    """Whether its session supports in-place changes, as last reported; None if not reported."""
    failures: int = 0
    """The number of failures in a row."""
    recoveries: tuple[float, ...] = ()
    """The times of recoveries, when it went on without workers that had died: UTC seconds, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTarget:
    """A target loss, and the step at which it is expected. Steps count from the beginning."""

    loss: float
    smoothed: float | None = None
    """The smoothed loss that the session reported."""
    step: int | None = None
    """The step at which the target is expected; None if there is no prediction ..."""
    at_most: int | None = None
    """... and the same plus one standard error."""
    told: int | None = None
    """The ``at_most`` that was last written to the event log."""
    reached: bool | None = None
    """None until the training has ended."""
    curve: LossCurve | None = None
    earlier: LossCurve | None = None
    """The curve of this task's last run."""

    def unpredicted(self) -> LossTarget:
        """Return a copy without a prediction."""
        return replace(self, step=None, at_most=None)

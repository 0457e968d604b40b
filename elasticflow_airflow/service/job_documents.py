"""Documents that are stored of a job: its verdict, its end, its changes in place, the loss that it trains to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticflow_airflow.scheduler_core.convergence import LossCurve
from elasticflow_airflow.wire import State
from elasticflow_airflow.wire.status import AdmissionDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVerdict:
    """What admission control decided of a job last. The API shows it as ``wire.Verdict``."""

    decision: AdmissionDecision = "undecided"
    reason: str = ""
    deadline_at: float | None = None
    earliest_deadline_at: float | None = None
    event_id: int | None = None
    """The event that tells of it; known once that is written (see ``NewEvent.is_verdict``)."""
    plan: list[dict[str, float]] | None = None
    """Segments of the plan that shows that the deadline can be kept, as ``codec.plan_to_json`` writes them."""
    limit: str = ""
    """What limits the workers beside the cluster, as a sentence; the reason ends with it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end that was decided; the job is over when its workers have left."""

    state: State
    reason: str
    failure: str | None = None
    use_checkpoint: bool = False
    """It succeeds by its last checkpoint, though it was not done."""

    def __post_init__(self) -> None:
        if not self.state.terminal:
            raise ValueError(f"{self.state.value!r} is no state in which a job is over")

    @property
    def is_done(self) -> bool:
        """Its gang has finished and left: workers that are there still came to join, and have nothing to save."""
        return self.state is State.SUCCEEDED and not self.use_checkpoint


@dataclass(frozen=True, slots=True)
class InPlaceRecord:
    """How changes of a job's workers without a restart went."""

    able: bool | None = None
    """Whether its session can be changed so, as it said last; None: it has not said."""
    failures: int = 0
    """In a row."""
    recoveries: tuple[float, ...] = ()
    """When it went on without workers that had died: UTC seconds, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTarget:
    """A loss to train to, and when it is expected. Steps count from the beginning."""

    loss: float
    smoothed: float | None = None
    """The session's smoothed loss."""
    step: int | None = None
    """When the target is expected; None: there is no prediction ..."""
    at_most: int | None = None
    """... and with one standard error."""
    told: int | None = None
    """The ``at_most`` that the event log knows."""
    reached: bool | None = None
    """None until the training has ended."""
    curve: LossCurve | None = None
    earlier: LossCurve | None = None
    """The curve of this task's last run."""

    def unpredicted(self) -> LossTarget:
        """Without a prediction."""
        return replace(self, step=None, at_most=None)

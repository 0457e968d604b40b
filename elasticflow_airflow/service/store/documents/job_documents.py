"""Documents that are stored of a job: its verdict, its costs and changes in place, its loss target, its end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from elasticflow_airflow.api import State
from elasticflow_airflow.api.status import AdmissionDecision
from elasticflow_airflow.scheduler_core.convergence import LossCurve


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """What starts, changes of workers and ends of a job took, in seconds; None: not measured yet."""

    startup_s: float | None = None
    pause_s: float | None = None
    """Of a restart with other workers."""
    tail_s: float | None = None
    """From the last step until the job is over."""
    in_place_pause_s: float | None = None
    join_s: float | None = None
    """What workers need to join in place; the others train on meanwhile."""

    def known(self) -> dict[str, float]:
        """Those that were measured, by name."""
        return {name: cost for name, cost in asdict(self).items() if cost is not None}

    def updated(self, **measured_s: float) -> MeasuredCosts:
        """The costs to plan with after another measurement: a higher one counts at once, a lower one half.

        One that is far higher counts in part: what happens once must not keep a task out for days.
        """
        before = self.known()
        return replace(self, **{name: _blend(before.get(name, cost), cost) for name, cost in measured_s.items()})


def _blend(before_s: float, measured_s: float) -> float:
    believed_s = min(measured_s, max(3.0 * before_s, before_s + 60.0))
    return max(believed_s, (before_s + believed_s) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """What the last run of a recurring task was like: its next runs are expected to be like it."""

    signature: str = ""
    """Under which its history is kept; see ``task_history.signature_of``."""
    scaling_curve: dict[int, float] | None = None
    """Steps/s by workers, where its submission gave them."""
    min_workers: int = 1
    max_workers: int | None = None
    logical_workers: int | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the samples of a training are thinned, and what its workers have reported last beside its progress."""

    number: int | None = None
    """Of the last sample; None: there is none yet. The numbers that are kept are multiples of ``stride``."""
    at: float = 0.0
    """When that was, in UTC seconds."""
    workers: int | None = None
    """How many there were."""
    stride: int = 1
    """When there are too many samples it doubles, and every second one is deleted."""
    noise_scale: float | None = None
    samples_per_s: float | None = None
    refused: tuple[str, ...] = ()
    """Fields of reports of which the owner was told that they are out of bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmendmentAnswer:
    """What the loop says to an amendment; the API shows it as ``AmendAnswer``."""

    accepted: bool
    reason: str
    earliest_deadline_at: float | None = None


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

"""How modelled jobs behave: what a test says of them. Knows nothing of how that is played."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from elasticflow_airflow.engines.port import GangSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeBehaviour:
    """How a modelled job behaves. Speeds at unlisted sizes are those of the largest listed size below."""

    steps_per_s: Mapping[int, float] = field(default_factory=lambda: {1: 10.0, 2: 18.0, 4: 32.0, 8: 56.0})
    startup_s: float = 1.0
    save_s: float = 0.2
    tail_s: float = 0.2
    """From the report ``finished`` to the end of the processes."""
    report_interval_s: float = 0.5
    reports_a_jump: int | None = None
    """So often at most it reports, and saves, when the clock jumps; None: 500 reports."""
    samples: int | None = None
    """Size of an epoch as the session finds it, when the submitter did not say."""
    reports: bool = True
    """False: a plain script that says nothing, not even ``started``."""
    uses_session: bool = False
    """It says before it starts that its script imports the runtime, as real workers do."""
    initial_loss: float = 4.0
    final_loss: float = 0.5
    losses: Mapping[int, float] = field(default_factory=dict)
    """By step, instead of a loss that falls from the initial to the final one; between two of them a straight line."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """What the session reports with its end."""
    seed: int = 0
    """What the script says, where none was submitted."""
    logical_workers: int | None = None
    """How many its script says that it has, where it decides."""
    threads: int | None = None
    """With how many a worker says that it computes."""
    fail_at_step: int | None = None
    failure: str = "RuntimeError: injected failure"
    exit_at_step: int | None = None
    """Every worker leaves with status 0 there, without ``finished``."""
    early_at_step: int | None = None
    """The session finishes there."""
    early: str | None = "no better for 3 epochs"
    """Why; None: it does not say that this is meant."""
    hang_at_step: int | None = None
    nan_loss_at_step: int | None = None
    backwards_at_step: int | None = None
    """From there on the reported steps begin again at 0."""
    out_of_memory_above: int | None = None
    """A micro-batch larger than this does not fit; without ``micro_batch_size`` it is the share of a worker."""
    ignores_leave: bool = False
    """Does not save and leave when told to; ends by SIGKILL after the grace twice."""
    damaged_checkpoints: bool = False
    in_place: bool = False
    """Its session can be changed without a restart."""
    join_s: float | None = None
    """How long new workers take until they can join (None: ``startup_s``)."""
    in_place_pause_s: float = 0.084
    state_bytes: int = 44_000_000
    plan_wait_s: float = 60.0
    """So long survivors of a dead worker wait for a new plan."""
    joiner_dies: int = 0
    """So many of the job's first joiners die as soon as they are up."""
    target_length: float = 1.0
    """With a target loss: the modelled session's prediction, as a part of the steps that it will really take ..."""
    target_error: float | None = 0.1
    """... and its standard error, as a part of the prediction; None: it never predicts."""
    slow_slots: Mapping[str, float] = field(default_factory=dict)
    """By "node:index": so many times as long a worker computes there; the others wait for it, and all report it."""
    compute_part: float = 1.0  # of a step without slow workers
    never_switches: bool = False
    """Changes in place are begun and never come about."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps_per_s", {int(k): float(v) for k, v in self.steps_per_s.items()})
        object.__setattr__(self, "losses", {int(k): float(v) for k, v in sorted(self.losses.items(), key=_step_of)})
        if not self.steps_per_s or min(self.steps_per_s.values()) <= 0:
            raise ValueError(f"steps_per_s={dict(self.steps_per_s)} needs positive speeds, by number of workers")

    def speed(self, workers: int) -> float:
        """Steps/s with so many workers."""
        known = [size for size in self.steps_per_s if size <= workers]
        return self.steps_per_s[max(known) if known else min(self.steps_per_s)]

    def changed(self, raw: Mapping[str, Any]) -> FakeBehaviour:
        """A copy with some fields replaced; ValueError names an unknown one."""
        known = {f.name for f in fields(self)}
        unknown = sorted(set(raw) - known)
        if unknown:
            raise ValueError(f"unknown fake behaviour {unknown}; known: {sorted(known)}")
        return FakeBehaviour(**{**asdict(self), **raw})


def _step_of(item: tuple[int | str, float]) -> int:
    return int(item[0])  # JSON has made text of it


class Modelled(Protocol):
    """A modelled gang, as far as those see it who say what it reports."""

    @property
    def spec(self) -> GangSpec:
        """What it is to do."""
        ...

    @property
    def behaviour(self) -> FakeBehaviour:
        """How it does it."""
        ...

    @property
    def step(self) -> float:
        """Where it is."""
        ...

    @property
    def total_steps(self) -> int | None:
        """Its length, when that is known."""
        ...

    @property
    def workers(self) -> int:
        """How many they are."""
        ...

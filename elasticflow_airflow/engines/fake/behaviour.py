"""How modelled jobs behave, as configured by a test. Does not know how the behaviour is simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from elasticflow_airflow.engines.port import GangSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeBehaviour:
    """Behaviour of a modelled job. The speed at an unlisted size is that of the next smaller listed size."""

    steps_per_s: Mapping[int, float] = field(default_factory=lambda: {1: 10.0, 2: 18.0, 4: 32.0, 8: 56.0})
    startup_s: float = 1.0
    save_s: float = 0.2
    tail_s: float = 0.2
    """Time from the report ``finished`` to the end of the processes."""
    report_interval_s: float = 0.5
    reports_a_jump: int | None = None
    """Maximum number of reports, and of saves, per clock jump; None: 500 reports."""
    samples: int | None = None
    """Epoch size that the session determines when the submitter gave none."""
    reports: bool = True
    """False: a plain script that reports nothing, not even ``started``."""
    uses_session: bool = False
    """Report before ``started`` that the script imports the runtime, as real workers do."""
    initial_loss: float = 4.0
    final_loss: float = 0.5
    losses: Mapping[int, float] = field(default_factory=dict)
    """Loss by step, linearly interpolated; replaces the default curve from the initial to the final loss."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics that the session reports when it finishes."""
    seed: int = 0
    """Seed that the script reports when none was submitted."""
    logical_workers: int | None = None
    """Number of logical workers that the script reports, in jobs where the script decides."""
    threads: int | None = None
    """Number of compute threads that a worker reports."""
    fail_at_step: int | None = None
    failure: str = "RuntimeError: injected failure"
    broken_devices: Mapping[str, str] = field(default_factory=dict)
    """By "node:index": what a worker there fails with as soon as it trains, as its device is broken."""
    exit_at_step: int | None = None
    """Every worker exits with status 0 at this step, without ``finished``."""
    early_at_step: int | None = None
    """The session finishes at this step."""
    early: str | None = "no better for 3 epochs"
    """Reason for the early finish; None: the session does not report it as intended."""
    hang_at_step: int | None = None
    nan_loss_at_step: int | None = None
    backwards_at_step: int | None = None
    """From this step on, reported steps restart at 0."""
    out_of_memory_above: int | None = None
    """Larger micro-batches do not fit in memory; without ``micro_batch_size``, a worker's share is the micro-batch."""
    ignores_leave: bool = False
    """Ignores the order to save and leave; is killed by SIGKILL after twice the grace period."""
    damaged_checkpoints: bool = False
    in_place: bool = False
    """The session supports changes without a restart."""
    join_s: float | None = None
    """Time until new workers can join (None: ``startup_s``)."""
    in_place_pause_s: float = 0.084
    state_bytes: int = 44_000_000
    plan_wait_s: float = 60.0
    """How long the survivors of a dead worker wait for a new plan."""
    joiner_dies: int = 0
    """Number of the job's first joining workers that die as soon as they are up."""
    target_length: float = 1.0
    """With a target loss: the session's prediction, as a fraction of the steps that are really needed ..."""
    target_error: float | None = 0.1
    """... and its standard error, as a fraction of the prediction; None: the session never predicts."""
    slow_slots: Mapping[str, float] = field(default_factory=dict)
    """By "node:index": factor on the compute time of a worker there; the others wait for it, and all report it."""
    compute_part: float = 1.0  # fraction of a step without slow workers
    never_switches: bool = False
    """Changes in place are begun and never completed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps_per_s", {int(k): float(v) for k, v in self.steps_per_s.items()})
        object.__setattr__(self, "losses", {int(k): float(v) for k, v in sorted(self.losses.items(), key=_step_of)})
        if not self.steps_per_s or min(self.steps_per_s.values()) <= 0:
            raise ValueError(f"steps_per_s={dict(self.steps_per_s)} needs positive speeds, by number of workers")

    def speed(self, workers: int) -> float:
        """Return the speed in steps/s with this number of workers."""
        known = [size for size in self.steps_per_s if size <= workers]
        return self.steps_per_s[max(known) if known else min(self.steps_per_s)]

    def changed(self, raw: Mapping[str, Any]) -> FakeBehaviour:
        """Return a copy with some fields replaced. Raises ValueError that names unknown fields."""
        known = {f.name for f in fields(self)}
        unknown = sorted(set(raw) - known)
        if unknown:
            raise ValueError(f"unknown fake behaviour {unknown}; known: {sorted(known)}")
        return FakeBehaviour(**{**asdict(self), **raw})


def _step_of(item: tuple[int | str, float]) -> int:
    return int(item[0])  # JSON turns the keys into strings


class Modelled(Protocol):
    """The part of a modelled gang that the functions composing its reports need."""

    @property
    def spec(self) -> GangSpec:
        """Specification of the gang."""
        ...

    @property
    def behaviour(self) -> FakeBehaviour:
        """Behaviour of the gang."""
        ...

    @property
    def step(self) -> float:
        """Current step."""
        ...

    @property
    def total_steps(self) -> int | None:
        """Length of the training in steps; None when unknown."""
        ...

    @property
    def workers(self) -> int:
        """Number of workers."""
        ...

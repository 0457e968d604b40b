"""Notes on a generation: what its workers reported, and what the service did about it.

Stored with its row. All fields are optional: None and False mean that nothing was reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elasticflow_airflow.runtime.protocol import DEVICE_FAULT


@dataclass(frozen=True, slots=True)
class Finished:
    """The session has reported that the training is done."""

    path: str | None = None
    """The final checkpoint, relative to the checkpoint folder."""
    early: str | None = None
    """Why it ended before all its steps, in the script's words."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A micro-batch did not fit into the device's memory."""

    micro_batch_size: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Switch:
    """The cost of an in-place change: the maximum over all workers that reported."""

    at_s: float | None = None
    """When the last worker had joined."""
    pause_s: float | None = None
    state_bytes: float | None = None

    def at_least(self, at_s: float | None, pause_s: float | None, state_bytes: float | None) -> Switch:
        """Return the maximum of this and the report of another worker."""
        return Switch(_most(self.at_s, at_s), _most(self.pause_s, pause_s), _most(self.state_bytes, state_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationNotes:
    """The notes on one generation; see the module."""

    # What its workers reported.
    uses_session: bool = False
    """Its script imports the runtime."""
    in_place: bool | None = None
    """Whether its session can be changed without a restart; None if no session has begun."""
    started_at: float | None = None
    """When rank 0's session began its first step."""
    threads: int | None = None
    """The number of computing threads of each worker."""
    progress_of: str | None = None
    """The worker whose progress was used last."""
    switch: Switch = Switch()
    finished: Finished | None = None
    out_of_memory: OutOfMemory | None = None
    too_many: bool = False
    """It left because its script has fewer logical workers than there were workers."""
    message: str | None = None
    """The message of the first failure ..."""
    kind: str | None = None
    """... and its kind (see ``runtime.protocol``)."""
    absent: tuple[str, ...] = ()
    """Workers that did not answer when the gang was to switch generations."""
    windows: Mapping[str, list[float]] = field(default_factory=dict)
    """The computing seconds per step in the last windows, by worker."""
    exit_zero: bool = False
    """All its processes ended with status 0."""
    signalled: bool = False
    """A process was ended by a signal."""

    # What the service did.
    ordered_at_step: int | None = None
    own: bool = False
    """The service ordered it by itself; the scheduler is informed when it runs."""
    vacate: bool = False
    """The job frees its slots before this generation starts: other jobs wait for its slots, and it waits for theirs."""
    dropped: bool = False
    """It was never completed, and its outcome does not matter for the job."""
    told_started: bool = False
    told_silent: bool = False
    measured: bool = False
    """Its speed was measured or cannot be measured: the measurement that it was ordered for is over."""
    cost_measured: bool = False
    """The cost of its start or of its pause is known."""
    leaving_at: float | None = None
    """When its workers were first seen to leave, as they were told to."""
    left_at: float | None = None
    """When a worker was first seen to have left the others without a report."""
    slow: Mapping[str, float] = field(default_factory=dict)
    """When the service last reacted to a slow worker, by worker."""

    def failed(self, message: str, kind: str | None) -> GenerationNotes:
        """Add a worker's failure. The first failure is kept as the cause; later ones only lost their peer.

        But who lost a peer with a broken device may be first to say so.
        """
        if kind == DEVICE_FAULT and self.kind != DEVICE_FAULT:
            return replace(self, message=message, kind=kind)
        return replace(
            self,
            message=message if self.message is None else self.message,
            kind=kind if self.kind is None else self.kind,
        )


def _most(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)

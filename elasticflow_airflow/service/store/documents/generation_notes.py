"""What is noted of a generation: what its workers reported of themselves, and what the service did about it.

Stored with its row. All of it is optional: None and False mean that nobody has said so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Finished:
    """The session has said that the training is done."""

    path: str | None = None
    """The final checkpoint, relative to the checkpoint folder."""
    early: str | None = None
    """Why it ended before all of its steps, in the script's words."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """A micro-batch did not fit into the device's memory."""

    micro_batch_size: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Switch:
    """What a change in place cost; of what several workers say, the most."""

    at_s: float | None = None
    """When the last worker was in it."""
    pause_s: float | None = None
    state_bytes: float | None = None

    def at_least(self, at_s: float | None, pause_s: float | None, state_bytes: float | None) -> Switch:
        """With what another worker says."""
        return Switch(_most(self.at_s, at_s), _most(self.pause_s, pause_s), _most(self.state_bytes, state_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationNotes:
    """See the module."""

    # What its workers said.
    uses_session: bool = False
    """Its script imports the runtime."""
    in_place: bool | None = None
    """Its session can be changed without a restart; None: no session has begun."""
    started_at: float | None = None
    """When rank 0's session began its first step."""
    threads: int | None = None
    """Computing threads of each worker."""
    micro_batch_size: int | None = None
    progress_of: str | None = None
    """The worker whose progress was taken last."""
    switch: Switch = Switch()
    finished: Finished | None = None
    out_of_memory: OutOfMemory | None = None
    too_many: bool = False
    """It left, as its script has fewer logical workers than there were workers."""
    message: str | None = None
    """Of the failure that came first ..."""
    kind: str | None = None
    """... which kind it was (see ``runtime.protocol``) ..."""
    rank: int | None = None
    """... and where."""
    absent: tuple[str, ...] = ()
    """Workers that did not answer when the gang was to switch."""
    windows: Mapping[str, list[float]] = field(default_factory=dict)
    """By worker, the seconds that it computed for a step, of the last stretches."""
    exit_zero: bool = False
    """All its processes ended with status 0."""
    signalled: bool = False
    """A process was ended by a signal."""

    # What the service did.
    ordered_at_step: int | None = None
    own: bool = False
    """It was the service's idea: the scheduler hears of it when it runs."""
    vacate: bool = False
    """The job makes room before it starts: others wait for its slots, as it does for theirs."""
    dropped: bool = False
    """It has not come about, and what becomes of it means nothing for the job."""
    told_started: bool = False
    told_silent: bool = False
    measured: bool = False
    """Its speed was measured, or cannot be: the measurement that it was for is over."""
    cost_measured: bool = False
    """What its start or its pause cost is known."""
    left_at: float | None = None
    """When a worker was first seen to have left the others without a word."""
    slow: Mapping[str, float] = field(default_factory=dict)
    """By worker that was slow, when that was answered last."""

    def failed(self, message: str, kind: str | None, rank: int | None) -> GenerationNotes:
        """With a worker's failure. Who failed first names the cause; the others only lost their peer."""
        return replace(
            self,
            message=message if self.message is None else self.message,
            kind=kind if self.kind is None else self.kind,
            rank=rank if self.rank is None else self.rank,
        )


def _most(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)

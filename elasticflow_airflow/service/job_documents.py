"""Documents that are stored of a job: how it is to end."""

from __future__ import annotations

from dataclasses import dataclass

from elasticflow_airflow.wire import State


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

"""The state machines of jobs and generations. Every write of a state goes through here; docs/generate.py draws them.

The state of a job is what the service has decided. The state of a generation is what the engine has observed of its
workers: an observation may miss states, and a new engine may at first observe less than the engine before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from elasticflow_airflow.api import State
from elasticflow_airflow.engines.port import STANDING, GangState
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow

ORDERED: Final = "ordered"
"""The state of a generation that has not been given to the engine, or that the engine does not report yet."""

_ENDS = [state for state in State if state.terminal]
_ANY_END = frozenset(_ENDS)
JOB_TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.SUBMITTED: _ANY_END | {State.WAITING, State.PROFILING, State.ADMITTED, State.SUSPENDED},
    State.WAITING: _ANY_END | {State.PROFILING, State.ADMITTED, State.SUSPENDED},
    State.PROFILING: _ANY_END | {State.WAITING, State.ADMITTED, State.RUNNING, State.SUSPENDED},
    State.ADMITTED: _ANY_END | {State.WAITING, State.PROFILING, State.RUNNING, State.SUSPENDED},
    State.RUNNING: _ANY_END - {State.REJECTED} | {State.WAITING, State.SUSPENDED},
    State.SUSPENDED: _ANY_END | {State.WAITING, State.PROFILING, State.ADMITTED, State.RUNNING},
    **dict.fromkeys(_ENDS, frozenset[State]()),
}
"""The states that may follow each state of a job."""

GENERATION_TRANSITIONS: Mapping[str, frozenset[str]] = {
    ORDERED: frozenset(GangState),
    GangState.PENDING: frozenset({*STANDING, GangState.ENDED}),
    **dict.fromkeys(STANDING, frozenset({*STANDING, GangState.ENDED})),
    GangState.ENDED: frozenset(),
}
"""The states that may follow each state of a generation."""


class TransitionError(Exception):
    """A state that cannot follow the previous one: a defect of the service or of the engine."""


def move(row: IncarnationRow, state: State, reason: Reason) -> None:
    """Move a job to a state; if it is already in that state, only the reason changes. Raises TransitionError."""
    before = State(row.state)
    if state is not before and state not in JOB_TRANSITIONS[before]:
        raise TransitionError(f"it is {before.value}, and cannot become {state.value} ({reason})")
    row.state, row.state_reason = state.value, reason


def overwrite(row: IncarnationRow, state: State, reason: Reason) -> None:
    """Set the state of a job that is set aside, whatever its stored state is."""
    row.state, row.state_reason = state.value, reason


def advance(generation: GenerationRow, state: GangState) -> None:
    """Record the state that the engine has observed of a generation. Raises TransitionError."""
    before = generation.state
    if state != before and state not in GENERATION_TRANSITIONS.get(before, frozenset()):
        raise TransitionError(f"generation {generation.generation} is {before}, and cannot become {state.value}")
    generation.state = state.value


def overwrite_generation(generation: GenerationRow, state: GangState) -> None:
    """Record the observed state of a generation whose job is set aside, whatever its stored state is."""
    generation.state = state.value

"""Which states a job and its gangs go through. Every write of a state goes through here; docs/generate.py draws it.

A job's states are what the service has decided. A generation's are what the engine has seen of its workers: a look may
miss some, and a new engine may see less than the one before, until it has looked for long enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from elasticflow_airflow.api import State
from elasticflow_airflow.engines.port import STANDING, GangState
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow

ORDERED: Final = "ordered"
"""A generation that the engine has not been told of, or knows nothing of yet."""

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
"""From each state of a job to those that may follow it."""

GENERATION_TRANSITIONS: Mapping[str, frozenset[str]] = {
    ORDERED: frozenset(GangState),
    GangState.PENDING: frozenset({*STANDING, GangState.ENDED}),
    **dict.fromkeys(STANDING, frozenset({*STANDING, GangState.ENDED})),
    GangState.ENDED: frozenset(),
}
"""From each state of a generation to those that may follow it."""


class TransitionError(Exception):
    """A state that cannot follow the one before: a defect, of the service or the engine."""


def move(row: IncarnationRow, state: State, reason: str) -> None:
    """Move a job to a state; to stay where it is only gives it another reason. Raises TransitionError."""
    before = State(row.state)
    if state is not before and state not in JOB_TRANSITIONS[before]:
        raise TransitionError(f"it is {before.value}, and cannot become {state.value} ({reason})")
    row.state, row.state_reason = state.value, reason


def overwrite(row: IncarnationRow, state: State, reason: str) -> None:
    """Move a job that is set aside, from whatever is stored."""
    row.state, row.state_reason = state.value, reason


def advance(generation: GenerationRow, state: GangState) -> None:
    """Write down what the engine has seen of a generation. Raises TransitionError."""
    before = generation.state
    if state != before and state not in GENERATION_TRANSITIONS.get(before, frozenset()):
        raise TransitionError(f"generation {generation.generation} is {before}, and cannot become {state.value}")
    generation.state = state.value


def overwrite_generation(generation: GenerationRow, state: GangState) -> None:
    """Write down what the engine has seen of a generation whose job is set aside, over whatever is stored."""
    generation.state = state.value

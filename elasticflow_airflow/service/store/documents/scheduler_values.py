"""Converts the scheduler's values to JSON and back, for the store. Pure functions.

The conversion is driven by type hints: a new optional field needs no change here, and a state that an older version
wrote is read with the default of that field.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Union, cast, get_args, get_origin, get_type_hints

from elasticflow_airflow.scheduler_core.model.values import JobState, Placement, Plan, Slot
from elasticflow_airflow.service.store.documents.columns import Document

if TYPE_CHECKING:
    from sqlalchemy.engine.interfaces import Dialect

_PLAIN = frozenset({int, str, bool, type(None)})
"""Types of values that are JSON already."""
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class StoredState:
    """The scheduler's state of a job as it is stored: JSON, or its text, which is read when asked for.

    It changes with each report, and only a restart needs it: its text is made once, and stored as it is.
    """

    stored: Mapping[str, Any] | str

    @classmethod
    def of(cls, state: JobState) -> StoredState:
        """Return a state to store."""
        return cls(_ENCODER.encode(state_to_json(state)))

    @property
    def text(self) -> str:
        """The text of the JSON."""
        return self.stored if isinstance(self.stored, str) else _ENCODER.encode(self.stored)

    @property
    def raw(self) -> Mapping[str, Any]:
        """The state as JSON. Raises one of ``UNREADABLE`` if it is none."""
        return cast(Mapping[str, Any], json.loads(self.stored)) if isinstance(self.stored, str) else self.stored

    @property
    def state(self) -> JobState:
        """The state. Raises one of ``UNREADABLE`` if it cannot be read."""
        raw = self.raw
        state = state_from_json(raw)
        if "started" in raw:
            return state
        # Of an earlier release: where a report came first, it was not noted that the start is over.
        return replace(state, started=not state.starting or state.as_of_s > state.no_progress_until_s)

    @property
    def has_speed_sigma(self) -> bool:
        """Whether it was stored by a service that knew an error of the speed for each job."""
        return "speed_sigma" in self.raw["job"]


class StateDocument(Document[StoredState]):
    """The type of a column that holds states of the scheduler."""

    cache_ok = True

    def __init__(self) -> None:
        super().__init__(StoredState)

    def dump(self, document: StoredState) -> Any:
        """Return the state as JSON."""
        return document.raw

    def load(self, stored: Any) -> StoredState:
        """Return the stored state, whatever it is."""
        return StoredState(stored)

    def bind_processor(self, dialect: Dialect) -> Callable[[StoredState | None], str | None]:  # noqa: ARG002
        """Return a function from a state to the text to store, which no one takes apart and puts together again."""
        return lambda state: None if state is None else state.text

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[str | None], StoredState | None]:  # noqa: ARG002
        """Return a function from the stored text to its value; it does not read the text."""
        return lambda text: None if text in (None, "null") else StoredState(text)


def state_to_json(state: JobState) -> dict[str, Any]:
    """Return a whole JobState as JSON values."""
    return cast(dict[str, Any], _encode(state))


def state_from_json(raw: Mapping[str, Any]) -> JobState:
    """Inverse of :func:`state_to_json`."""
    return cast(JobState, _decode(JobState, raw))


def slots_to_json(slots: Iterable[Slot]) -> list[Any]:
    """Return slots as [node, index] pairs."""
    return [[slot.node_id, slot.index] for slot in slots]


def placement_from_json(raw: Iterable[Any]) -> Placement:
    """Inverse of :func:`slots_to_json`."""
    return Placement(tuple(Slot(str(node_id), int(index)) for node_id, index in raw))


def plan_to_json(plan: Plan | None) -> list[dict[str, float]] | None:
    """Return the segments of a plan as JSON values, or None."""
    if plan is None:
        return None
    return [
        {"start_s": s.start_s, "end_s": s.end_s, "workers": float(s.workers), "lost_s": s.lost_s} for s in plan.segments
    ]


def _encode(value: Any) -> Any:
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(float(value))  # JSON has no infinity, and PostgreSQL refuses it.
    fields_of = _fields_of(kind)
    if fields_of is not None:
        names, values = fields_of
        return {
            name: item if type(item) in _PLAIN else _encode(item)
            for name, item in zip(names, values(value), strict=True)
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, frozenset, set)):
        return [_encode(item) for item in value]
    return value


@cache
def _fields_of(kind: type) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]] | None:
    """Return the names of a dataclass's fields, and a function to their values; None for another class."""
    if not is_dataclass(kind):
        return None
    names = tuple(field.name for field in fields(kind))
    one = attrgetter(*names)
    return names, one if len(names) > 1 else lambda value: (one(value),)


def _decode(hint: Any, raw: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if raw is None:
            return None
        return _decode(next(a for a in arguments if a is not type(None)), raw)
    if origin is not None and issubclass(origin, Mapping):
        return {_decode(arguments[0], key): _decode(arguments[1], item) for key, item in raw.items()}
    if origin is tuple and arguments[-1] is Ellipsis:
        return tuple(_decode(arguments[0], item) for item in raw)
    if origin is frozenset:
        return frozenset(_decode(arguments[0], item) for item in raw)
    if isinstance(hint, type):
        if issubclass(hint, tuple) and hasattr(hint, "_fields"):
            return hint(*raw)
        if is_dataclass(hint):
            hints = _hints(hint)
            return hint(**{name: _decode(hints[name], item) for name, item in raw.items() if name in hints})
        if issubclass(hint, Enum) or hint in (int, float):
            return hint(raw)
    return raw


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)

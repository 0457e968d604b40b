"""Columns that hold a typed document: frozen objects in the code, JSON in the database.

A document is either a dataclass, changed by ``dataclasses.replace`` and stored without fields that have their default,
or a message of the API, stored whole. A stored document that cannot be read affects no other row: it becomes
:class:`Unreadable`, which raises when a field of it is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Generic, NoReturn, TypeVar

import sqlalchemy as sa
from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from elasticflow_airflow.api.base import Wire
from elasticflow_airflow.scheduler_core.model.reason import Reason

if TYPE_CHECKING:
    from sqlalchemy.engine.interfaces import Dialect
    from sqlalchemy.sql.operators import OperatorType

_D = TypeVar("_D")
_M = TypeVar("_M", bound=Wire)
_SECRET_FIELDS = {"secret_env"}
_REMEMBERED, _LONGEST = 4_096, 4_096
"""So many documents per column are kept by their text, if it has at most so many characters: every pass of the loop
reads those of all live jobs, owners poll them, and few have changed."""


class UnreadableError(ValueError):
    """A stored document is not what it should be."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a document that cannot be read. Written again, it keeps the stored value (a text if it is no JSON)."""

    stored: Any
    problem: str

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnreadableError(f"{name} cannot be read: {self.problem}")


def readable(document: _D | None) -> _D | None:
    """Return the document, or None if it is None or cannot be read."""
    return None if isinstance(document, Unreadable) else document


class Document(sa.types.TypeDecorator[_D], Generic[_D]):
    """The type of a column that holds documents of one kind."""

    impl = sa.JSON
    cache_ok = True

    def __init__(self, kind: type[_D], *, none_is_empty: bool = False) -> None:
        """``none_is_empty``: for a NOT NULL column, an empty object is stored if there is no document."""
        super().__init__(none_as_null=True)
        self.kind = kind
        self.none_is_empty = none_is_empty
        self._adapter = TypeAdapter(kind)
        self._of_text = lru_cache(maxsize=_REMEMBERED)(self._read)

    def dump(self, document: _D) -> Any:
        """Return the document as JSON."""
        return self._adapter.dump_python(document, mode="json", exclude_defaults=True, warnings=False)

    def load(self, stored: Any) -> _D:
        """Return the stored document. Raises ValidationError if it is not valid."""
        return self._adapter.validate_python(stored)

    def is_none(self, stored: Any) -> bool:
        """Whether the stored value means that there is no document."""
        return stored is None or (self.none_is_empty and stored == {})

    def coerce_compared_value(self, op: OperatorType | None, value: Any) -> Any:
        """Compare a part of the JSON with a plain value, not with a document."""
        return self.impl_instance.coerce_compared_value(op, value)

    def to_json(self, value: Any) -> Any:
        """Return the JSON to store for a value."""
        if value is None:
            return {} if self.none_is_empty else None
        if isinstance(value, Unreadable):
            return value.stored
        return self.dump(value)

    def from_json(self, stored: Any) -> Any:
        """Return the value of the stored JSON; :class:`Unreadable` if it is not valid."""
        if self.is_none(stored):
            return None
        try:
            return self.load(stored)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or self.kind.__name__
            return Unreadable(stored, f"{where}: {first['msg']}")

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002  (SQLAlchemy's signature)
        """See :meth:`to_json`."""
        return self.to_json(value)

    def column_expression(self, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        """Select the text of the JSON: equal texts are one document, which nobody changes."""
        return sa.type_coerce(sa.cast(column, sa.Text), self)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[str | None], Any]:  # noqa: ARG002  (SQLAlchemy's signature)
        """Return a function from the stored text to its value, as :meth:`from_json` gives it."""
        return lambda text: self._read(text) if text is not None and len(text) > _LONGEST else self._of_text(text)

    def _read(self, text: str | None) -> Any:
        try:
            stored = None if text is None else json.loads(text)
        except (ValueError, RecursionError) as error:
            return Unreadable(text, f"it is not JSON: {error}")
        return self.from_json(stored)


class ReasonText(sa.types.TypeDecorator[Reason]):
    """The type of a column that holds reasons, as the text of their JSON. A text that is none is its own sentence."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Reason | str | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        """Return the text to store; a sentence is stored as it is, as older services did."""
        return json.dumps(value.as_json(), separators=(",", ":")) if isinstance(value, Reason) else value

    def process_result_value(self, value: str | None, dialect: Dialect) -> Reason | None:  # noqa: ARG002
        """Return the stored reason."""
        return None if value is None else _reason_of_text(value)


@lru_cache(maxsize=10_000)  # Every pass reads the same texts again, and nobody changes a reason.
def _reason_of_text(text: str) -> Reason:
    if text.startswith('{"kind":'):
        with suppress(ValueError, TypeError, RecursionError):
            return Reason.from_json(json.loads(text))
    return Reason.quoted(text)  # An older service stored sentences.


def _reason_of(stored: Any) -> Reason:
    if isinstance(stored, Reason):
        return stored
    return Reason.quoted(stored) if isinstance(stored, str) else Reason.from_json(stored)


StoredReason = Annotated[Reason, PlainValidator(_reason_of), PlainSerializer(Reason.as_json)]
"""A reason in a document; older services stored sentences."""


class Message(Document[_M]):
    """The type of a column that holds messages of the API as they were accepted, without secret fields."""

    cache_ok = True

    def __init__(self, kind: type[_M], *, nullable: bool = False) -> None:
        """``nullable``: NULL means that there is no message; otherwise NULL is an unreadable message."""
        super().__init__(kind)
        self.nullable = nullable

    def is_none(self, stored: Any) -> bool:
        """Whether the stored value means that there is no message."""
        return self.nullable and stored is None

    def dump(self, document: _M) -> Any:
        """Return the message with all its fields, so that later changes of defaults do not affect it."""
        return document.model_dump(mode="json", exclude=_SECRET_FIELDS, warnings=False)

    def load(self, stored: Any) -> _M:
        """Return the stored message, even if it would not be accepted any more."""
        return self.kind.as_stored(stored)

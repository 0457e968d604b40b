"""Columns that hold a typed document: a frozen dataclass in the code, JSON in the database.

A document is changed by ``dataclasses.replace``, and what is as by default is not stored. A stored document that cannot
be read takes no other row with it: it becomes :class:`Unreadable`, which raises when somebody looks into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import sqlalchemy as sa
from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:
    from sqlalchemy.engine.interfaces import Dialect

_D = TypeVar("_D")


class UnreadableError(ValueError):
    """A stored document is not what it should be."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a document that cannot be read; written again, it is what was stored."""

    stored: Any
    problem: str

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnreadableError(f"{name} cannot be read: {self.problem}")


def readable(document: _D | None) -> _D | None:
    """The document; None, too, for one that cannot be read."""
    return None if isinstance(document, Unreadable) else document


class Document(sa.types.TypeDecorator[_D], Generic[_D]):
    """The type of a column that holds documents of one kind."""

    impl = sa.JSON
    cache_ok = True

    def __init__(self, kind: type[_D], *, none_is_empty: bool = False) -> None:
        """``none_is_empty``: an empty object is stored where there is no document, in a column that takes no NULL."""
        super().__init__(none_as_null=True)
        self.kind = kind
        self.none_is_empty = none_is_empty
        self._adapter = TypeAdapter(kind)

    def to_json(self, value: Any) -> Any:
        """What is stored for a value."""
        if value is None:
            return {} if self.none_is_empty else None
        if isinstance(value, Unreadable):
            return value.stored
        return self._adapter.dump_python(value, mode="json", exclude_defaults=True, warnings=False)

    def from_json(self, stored: Any) -> Any:
        """The value for what is stored."""
        if stored is None or (self.none_is_empty and stored == {}):
            return None
        try:
            return self._adapter.validate_python(stored)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or self.kind.__name__
            return Unreadable(stored, f"{where}: {first['msg']}")

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002  (SQLAlchemy's signature)
        """See :meth:`to_json`."""
        return self.to_json(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:  # noqa: ARG002  (SQLAlchemy's signature)
        """See :meth:`from_json`."""
        return self.from_json(value)

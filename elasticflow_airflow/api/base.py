"""What all messages are made from, and how an error is said."""

from __future__ import annotations

from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeGuard, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model

API_VERSION = "v1"
TRACEPARENT = "traceparent"
"""Label of a submission: where the job belongs in a trace (W3C Trace Context)."""
API_HEADER = "ElasticFlow-API"
VERSION_HEADER = "ElasticFlow-Version"
"""Every answer of a service carries the two, so that a client of another version can say so."""


_W = TypeVar("_W", bound="Wire")


class Wire(BaseModel):
    """Base of all messages: unknown fields are an error on the way in, so that a typing mistake is found at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def as_stored(cls, raw: object) -> Self:
        """What was taken in before. Types are checked; limits are not, which other versions have others of.

        Fields that are unknown are left out. Raises ValidationError where a field is missing or of another type.
        """
        return _built(cls, _unlimited(cls).model_validate(raw))


def _built(kind: type[_W], checked: BaseModel) -> _W:
    fields = {name: (kind.model_fields[name].annotation, value) for name, value in checked}
    return kind.model_construct(
        **{name: _built(of, value) if _is_wire(of) else value for name, (of, value) in fields.items()}
    )


def _is_wire(annotation: Any) -> TypeGuard[type[Wire]]:
    return isinstance(annotation, type) and issubclass(annotation, Wire)


@cache
def _unlimited(kind: type[Wire]) -> type[BaseModel]:
    """The same fields, with types and defaults alone."""
    fields: dict[str, Any] = {
        name: (_bare_type(field.annotation), Field(default=field.default, default_factory=field.default_factory))
        for name, field in kind.model_fields.items()
    }
    return create_model(kind.__name__, **fields)


def _bare_type(annotation: Any) -> Any:
    """An annotation without limits; of a choice any text, as another version may have others."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bare_type(parts[0])
    if origin is Literal:
        return str
    if _is_wire(annotation):
        return _unlimited(annotation)
    if not parts:
        return annotation
    bare = tuple(part if part is ... else _bare_type(part) for part in parts)
    return reduce(or_, bare) if origin in (Union, UnionType) else origin[bare]


class Problem(Wire):
    """Body of every error answer: what was wrong, and what to do."""

    error: str
    message: str
    hint: str = ""

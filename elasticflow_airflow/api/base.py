"""The base class of all messages, and the error response."""

from __future__ import annotations

from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeGuard, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model

API_VERSION = "v1"
TRACEPARENT = "traceparent"
"""Label of a submission that holds its trace parent (W3C Trace Context)."""
API_HEADER = "ElasticFlow-API"
VERSION_HEADER = "ElasticFlow-Version"
"""Every response carries both headers, so that a client can report a version mismatch."""
IDEMPOTENCY_HEADER = "Idempotency-Key"
"""Names one submission by its client: where it arrives again, late or at another replica, its claim is the same."""


_W = TypeVar("_W", bound="Wire")


class Wire(BaseModel):
    """Base class of all messages. Unknown fields in a request are an error, so that a typo is found at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def as_stored(cls, raw: object) -> Self:
        """Read a message that was validated when it was stored.

        Types are checked, limits are not, since other versions may have other limits. Unknown fields are dropped.
        Raises ValidationError if a field is missing or has another type.
        """
        return _built(cls, _unlimited(cls).model_validate(raw))


def _built(kind: type[_W], checked: BaseModel) -> _W:
    values = dict(vars(checked))
    for name, of in _messages_in(kind):
        values[name] = _built(of, values[name])
    made = kind.__new__(kind)
    # As if it were unpickled: ``model_construct`` takes several times as long, and every pass reads all jobs.
    made.__setstate__(
        {
            "__dict__": values,
            "__pydantic_fields_set__": checked.model_fields_set,
            "__pydantic_extra__": None,
            "__pydantic_private__": None,
        }
    )
    return made


@cache
def _messages_in(kind: type[Wire]) -> tuple[tuple[str, type[Wire]], ...]:
    return tuple((name, of) for name, field in kind.model_fields.items() if _is_wire(of := field.annotation))


def _is_wire(annotation: Any) -> TypeGuard[type[Wire]]:
    return isinstance(annotation, type) and issubclass(annotation, Wire)


def _mentions_wire(annotation: Any) -> bool:
    return _is_wire(annotation) or any(map(_mentions_wire, get_args(annotation)))


@cache
def _unlimited(kind: type[Wire]) -> type[BaseModel]:
    """Return a model with the same fields, types and defaults, but without limits."""
    fields: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if _mentions_wire(field.annotation) and not _is_wire(field.annotation):
            raise TypeError(f"{kind.__name__}.{name}: a stored message has others only as plain fields")
        bare = Field(default_factory=field.default_factory) if field.default_factory else Field(field.default)
        fields[name] = (_bare_type(field.annotation), bare)
    return create_model(kind.__name__, **fields)


def _bare_type(annotation: Any) -> Any:
    """Return an annotation without limits. A Literal becomes str, since another version may have other choices."""
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
    """Body of every error response: what was wrong, and how to fix it."""

    error: str
    message: str
    hint: str = ""

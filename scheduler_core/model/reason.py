"""Reasons of decisions as data: a kind, which is its English sentence with named places, and the parameters for these.

Whoever shows a reason renders it. Whether a reader may see a name is decided on the parameter that has it, not on the
finished sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, Union

from elasticflow_airflow.times import duration, moment

Parameter = Union[str, float, int, "Reason", Sequence["Parameter"]]
"""A value in a sentence: a text, a number, a reason, or several of them."""
Named = Callable[[str], str]
"""Returns the name by which people know a recurring task, from its key."""
_PLACE = re.compile(r"\{(\w+)(?::([^{}]*))?\}")
_LISTED = 2
"""Of a longer list, so many are named, and the others counted."""


class Part(NamedTuple):
    """A part of a rendered sentence, ``length`` characters from ``at``, that not everybody may read.

    ``what`` is "job" (``of`` is its id), "task" (``of`` is its recurring key) or "text": words that are not the
    scheduler's own, such as an error message, which may name anything.
    """

    at: int
    length: int
    what: str
    of: str


class Reason:
    """Why something was decided.

    Places in the kind are ``{name}`` or ``{name:form}``. A form is ``job`` (a job's id), ``task`` (a recurring key),
    ``text`` (words that are not the scheduler's own), ``moment`` (UTC seconds), ``duration`` (seconds), ``#thing`` (a
    number of things), or a format of Python for numbers. Braces that are no place of a parameter stand for themselves.
    """

    __slots__ = ("kind", "parameters")

    kind: str
    parameters: Mapping[str, Parameter]

    def __init__(self, kind: str, /, **parameters: Parameter) -> None:
        self.kind, self.parameters = kind, parameters

    @classmethod
    def quoted(cls, text: str) -> Self:
        """Return the reason that consists of a text that is not the scheduler's own."""
        return cls("{text:text}", text=text) if text else cls("")

    def __str__(self) -> str:
        return "".join(piece for piece, _, _ in self._pieces(str))

    def __repr__(self) -> str:
        return f"Reason({self.kind!r}, **{self.parameters!r})"

    def __bool__(self) -> bool:
        return bool(self.kind)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reason):
            return NotImplemented
        return self.kind == other.kind and self.parameters == other.parameters

    def __hash__(self) -> int:
        return hash(self.kind)

    def rendered(self, named: Named) -> tuple[str, list[Part]]:
        """Return the sentence, and what it mentions, in order."""
        text, mentions = "", []
        for piece, what, of in self._pieces(named):
            if what and piece:
                mentions.append(Part(len(text), len(piece), what, of))
            text += piece
        return text, mentions

    def as_json(self) -> dict[str, Any]:
        """Return the kind and the parameters as JSON values."""
        return {"kind": self.kind, "parameters": {name: _to_json(value) for name, value in self.parameters.items()}}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Return the reason of :meth:`as_json`. Raises ValueError if it is none."""
        if not isinstance(stored, Mapping):
            raise ValueError("a reason has a kind, and parameters by name")
        kind, parameters = stored.get("kind"), stored.get("parameters", {})
        if not isinstance(kind, str) or not isinstance(parameters, Mapping):
            raise ValueError("a reason has a kind, and parameters by name")
        return cls(kind, **{str(name): _from_json(value) for name, value in parameters.items()})

    def _pieces(self, named: Named) -> Iterator[tuple[str, str, str]]:
        """Yield the parts of the sentence, each with what it mentions."""
        after = 0
        for place in _PLACE.finditer(self.kind):
            name, form = place[1], place[2] or ""
            if name in self.parameters:
                yield self.kind[after : place.start()], "", ""
                yield from _shown(self.parameters[name], form, named)
                after = place.end()
        yield self.kind[after:], "", ""


def _shown(value: Parameter, form: str, named: Named) -> Iterator[tuple[str, str, str]]:
    if isinstance(value, Reason):
        yield from value._pieces(named)
    elif isinstance(value, str):
        yield (named(value) if form == "task" else value), form if form in ("job", "task", "text") else "", value
    elif isinstance(value, int | float):
        yield _number(value, form), "", ""
    else:
        yield from _several(value, form, named)


def _several(values: Sequence[Parameter], form: str, named: Named) -> Iterator[tuple[str, str, str]]:
    more = len(values) - _LISTED
    shown = values[:_LISTED]
    for number, value in enumerate(shown):
        if number:
            yield ", " if more > 0 else " and ", "", ""
        yield from _shown(value, form, named)
    if more > 0:
        yield f" and {more} more", "", ""


def _number(value: float, form: str) -> str:
    if form == "moment":
        return moment(value)
    if form == "duration":
        return duration(value)
    if form.startswith("#"):
        return f"{value} {form[1:]}" if value == 1 else f"{value} {form[1:]}s"
    try:
        return format(value, form)
    except ValueError:  # Stored by hand, or by another release.
        return str(value)


def _to_json(value: Parameter) -> Any:
    if isinstance(value, Reason):
        return value.as_json()
    return value if isinstance(value, str | int | float) else [_to_json(one) for one in value]


def _from_json(value: Any) -> Parameter:
    if isinstance(value, Mapping):
        return Reason.from_json(value)
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Iterable):
        return [_from_json(one) for one in value]
    raise ValueError(f"{type(value).__name__} is no parameter of a reason")

"""Error messages for invalid request parameters: the limit, and what to do. Pure functions.

Fields of a body have their own messages (``api.fields``); path and query parameters are validated by pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LIMITS = {
    "greater_than_equal": ("ge", "must be at least {}: give more"),
    "greater_than": ("gt", "must be more than {}: give more"),
    "less_than_equal": ("le", "must be at most {}: give less"),
    "less_than": ("lt", "must be less than {}: give less"),
    "string_too_long": ("max_length", "may have {} characters: shorten it"),
    "string_too_short": ("min_length", "must have at least {} characters: give it"),
    "too_long": ("max_length", "may be given {} times: ask for fewer at once"),
    "enum": ("expected", "is none of those there are: give {}"),
    "string_pattern_mismatch": ("pattern", "is no such name: give one of the form {}"),
}
_KINDS = {
    "int_parsing": "is no whole number: give one, in digits",
    "int_parsing_size": "is too large a number: give fewer digits",
    "int_from_float": "is no whole number: give one, without a fraction",
    "float_parsing": "is no number: give one, in digits",
    "finite_number": "must be a finite number: give one, in digits",
    "bool_parsing": "is neither true nor false: give one of the two",
    "missing": "is missing: give it",
}


def in_our_words(error: Mapping[str, Any]) -> str:
    """Return our message for a pydantic error of a path or query parameter, and pydantic's own for any other."""
    kind, said = str(error["type"]), str(error["msg"])
    if error["loc"][:1] not in (("query",), ("path",)):
        return said
    if kind in _LIMITS:
        name, sentence = _LIMITS[kind]
        limit = error.get("ctx", {}).get(name)
        return said if limit is None else sentence.format(f"{limit:.15g}" if isinstance(limit, float) else limit)
    return _KINDS.get(kind, said)

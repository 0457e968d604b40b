"""Functions that a DAG author passes to an elastic task, as callables or import paths, and how they are called.

Knows nothing about jobs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


class Concealed:
    """Wraps a callable among the arguments of ``partial()``, which Airflow would otherwise have to serialize.

    Airflow cannot serialize most callables, and need not: a worker reads the DAG file. The wrapper is serialized as a
    name that does not change from parse to parse.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __str__(self) -> str:
        name = getattr(self.value, "__qualname__", None) or type(self.value).__qualname__
        return f"{getattr(self.value, '__module__', '')}.{name}".lstrip(".")


def conceal(value: Any) -> Any:
    """Wrap a callable (or a list of such) for ``partial()``; anything else is returned as it is."""
    if isinstance(value, (list, tuple)):
        return [conceal(one) for one in value]
    return Concealed(value) if callable(value) else value


def reveal(value: Any) -> Any:
    """Undo ``conceal``."""
    if isinstance(value, (list, tuple)):
        return [reveal(one) for one in value]
    return value.value if isinstance(value, Concealed) else value


def listed(given: Any) -> list[Any]:
    """Return a list of one, several or no values."""
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def problem_of(given: Any) -> str | None:
    """Return what is wrong with a given callable, or None, as far as can be determined without importing anything."""
    if callable(given):
        return None
    if isinstance(given, str) and "." in given and all(part.isidentifier() for part in given.split(".")):
        return None
    return "must be a callable, or where to import one from: 'package.module.function'"


def loaded(given: Any) -> Callable[..., Any]:
    """Return the callable that was given. Raises ImportError, naming the path, or TypeError."""
    found = given
    if isinstance(given, str):
        module, _, name = given.rpartition(".")
        try:
            found = getattr(import_module(module), name)
        except AttributeError:
            raise ImportError(f"module {module!r} has no {name!r}") from None
    if not callable(found):
        raise TypeError(f"{given!r} is a {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]  # checked above


def call_by_name(function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Call a function with those of the offered values that its parameters name (all, if it takes ``**kwargs``)."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return function(**{name: value for name, value in offered.items() if takes_all or name in parameters})

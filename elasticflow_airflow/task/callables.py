"""Functions that a DAG author hands to an elastic task: as they are, or by import path, and how they are called.

Knows nothing of jobs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


class Concealed:
    """A callable among the arguments of ``partial()``, which Airflow would have to write into the serialized DAG.

    It has no way to write most of them, and needs none: a worker reads the DAG file. This is written as a name that
    does not change from parse to parse.
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
    """Make a list of one, several or none."""
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def problem_of(given: Any) -> str | None:
    """What is wrong with a callable that was given, as far as it can be told without importing anything."""
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
    return found  # type: ignore[no-any-return]  # it is callable: just asked


def call_by_name(function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Call a function with those of the offered values that its parameters name (all, if it takes ``**kwargs``)."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return function(**{name: value for name, value in offered.items() if takes_all or name in parameters})

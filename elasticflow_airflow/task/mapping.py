"""Checks mapped training tasks at DAG parse: the arguments of ``partial()`` and ``expand()``, as far as they are known.

Airflow creates the operators of a mapped task only when the task runs, so without this a mistake would show only then.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

from airflow.sdk.bases.decorator import _TaskDecorator
from airflow.sdk.definitions.mappedoperator import MappedOperator, OperatorPartial

from elasticflow_airflow.api.training_options import DEFAULTS, OPTIONS, ValueKind, names_of
from elasticflow_airflow.deadlines.dag_deadline import alerts_of, check_time_from_dag
from elasticflow_airflow.deadlines.parse import DeadlineError
from elasticflow_airflow.task.arguments import ArgumentError, check_arguments, check_each, is_late
from elasticflow_airflow.task.callables import conceal, reveal
from elasticflow_airflow.task.task_submission import check_downstream

_CALLED = names_of(ValueKind.CALLABLE, ValueKind.CALLABLES)
_UNKNOWN = "{{ mapped }}"
"""Placeholder for a value that another task will return."""


class NamesCheckedPartial(OperatorPartial):
    """The return value of ``partial()``: Airflow's class, which also checks names in a literal ``expand_kwargs``."""

    given: frozenset[str] = frozenset()
    """The arguments that the author gave to ``partial()``; ``kwargs`` also contains Airflow's defaults."""

    def _expand(self, expand_input: Any, *, strict: bool) -> MappedOperator:
        try:
            self._check(expand_input.value, strict=strict)
        except (ArgumentError, DeadlineError):
            self._expand_called = True  # otherwise Airflow would warn that expand() was not called
            raise
        return super()._expand(expand_input, strict=strict)

    def _check(self, mapped: Any, *, strict: bool) -> None:
        """Refuse what is known to be wrong. Raises ArgumentError or DeadlineError."""
        for index, one in _literal_tasks(mapped):
            _check_names(self, index, one, strict=strict)


class CheckedPartial(NamesCheckedPartial):
    """The return value of ``ElasticTrainOperator.partial()``, which also checks values before it maps."""

    def _check(self, mapped: Any, *, strict: bool) -> None:
        super()._check(mapped, strict=strict)
        _check(self, mapped)

    def _expand(self, expand_input: Any, *, strict: bool) -> MappedOperator:
        mapped = super()._expand(expand_input, strict=strict)
        # Airflow calls this on each task once the DAG file has been read; a mapped task has no operator then.
        mapped.resolve_template_files = partial(_check_in_dag, mapped)  # type: ignore[method-assign]
        return mapped


class NamesCheckedFunction(_TaskDecorator[..., Any, Any]):
    """A decorated function: Airflow's own class, which also checks names in a literal ``expand_kwargs``."""

    @classmethod
    def of(cls, made: Any) -> NamesCheckedFunction:
        """Convert the task decorator that Airflow's factory created for a function."""
        return cls(
            function=made.function,
            operator_class=made.operator_class,
            multiple_outputs=made.multiple_outputs,
            kwargs=made.kwargs,
        )

    def expand_kwargs(self, kwargs: Any, *, strict: bool = True) -> Any:
        """Map the function over a list of its arguments. Raises ArgumentError."""
        parameters = inspect.signature(self.function).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        given = self.kwargs.get("op_kwargs", {})
        for index, one in _literal_tasks(kwargs):
            for name in one:
                if name not in parameters and not takes_any:
                    listed = f"it has {', '.join(parameters) or 'none'}"
                    raise _unknown(index, f"{self.function.__name__}()", name, parameters, listed)
                if strict and name in given:
                    raise _given_twice(index, name)
        return super().expand_kwargs(kwargs, strict=strict)


def names_checked(begun: OperatorPartial, given: Iterable[str]) -> NamesCheckedPartial:
    """Convert the result of Airflow's ``partial()``; ``given`` are the names of the author's arguments."""
    begun._expand_called = True  # from here on our object is the one that must be mapped
    made = NamesCheckedPartial(operator_class=begun.operator_class, kwargs=begun.kwargs, params=begun.params)
    made.given = frozenset(given)
    return made


def checked(begun: OperatorPartial, given: Iterable[str]) -> CheckedPartial:
    """Like ``names_checked``, but checks values, too, and wraps callables so that the DAG can be serialized.

    Raises ArgumentError or DeadlineError.
    """
    begun._expand_called = True  # from here on our object is the one that must be mapped
    check_each({name: value for name, value in begun.kwargs.items() if name in OPTIONS})
    kwargs = {name: conceal(value) if name in _CALLED else value for name, value in begun.kwargs.items()}
    made = CheckedPartial(operator_class=begun.operator_class, kwargs=kwargs, params=begun.params)
    made.given = frozenset(given)
    return made


def _literal_tasks(mapped: Any) -> Iterator[tuple[int, Mapping[Any, Any]]]:
    """Yield the dicts of a literal ``expand_kwargs()`` with their map indexes; none for ``expand()`` or an XCom."""
    if not isinstance(mapped, Mapping) and _is_literal(mapped):
        yield from ((index, one) for index, one in enumerate(mapped) if isinstance(one, Mapping))


def _check_names(begun: NamesCheckedPartial, index: int, one: Mapping[Any, Any], *, strict: bool) -> None:
    """Refuse names that the operator does not know or that ``partial()`` has; Airflow does so only at run time."""
    operator, known = begun.operator_class, _parameters(begun.operator_class)
    for name in one:
        if name not in known:
            raise _unknown(index, operator.__name__, name, known, "the reference lists those that it has")
        if strict and name in begun.given:
            raise _given_twice(index, name)
        if strict and name in begun.kwargs and name != "params":
            raise ArgumentError(
                f"mapped task {index}: {name!r} is the same for all mapped tasks: give it to partial(); or say"
                " expand_kwargs(..., strict=False)"
            )


def _unknown(index: int, whose: str, name: Any, known: Iterable[str], listed: str) -> ArgumentError:
    close = get_close_matches(str(name), list(known), n=1)
    remedy = f": did you mean {close[0]!r}?" if close else f"; {listed}"
    return ArgumentError(f"mapped task {index}: {whose} has no argument {name!r}{remedy}")


def _given_twice(index: int, name: str) -> ArgumentError:
    return ArgumentError(
        f"mapped task {index}: {name!r} is given twice, to partial() and in expand_kwargs(): leave it out of one of"
        " them; or say expand_kwargs(..., strict=False), and each task's own counts"
    )


def _parameters(operator: type[Any]) -> set[str]:
    """Return the names of all arguments of an operator, including those of its base classes."""
    makers = [vars(kind)["__init__"] for kind in operator.__mro__ if kind is not object and "__init__" in vars(kind)]
    return {name for make in makers for name, one in inspect.signature(make).parameters.items() if _named(one)} - {
        "self"
    }


def _named(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and not parameter.name.startswith(
        "_"
    )


def _check(begun: OperatorPartial, mapped: Any) -> None:
    common = _common(begun)
    if isinstance(mapped, Mapping):  # expand(): a list for each argument
        for name, values in mapped.items():
            if _is_literal(values):
                for index, value in enumerate(values):
                    _check_one(index, {**common, **_placeholders(mapped), name: value})
    for index, one in _literal_tasks(mapped):
        _check_one(index, {**common, **one})


def _placeholders(mapped: Mapping[str, Any]) -> dict[str, Any]:
    """Return one value for each mapped argument: its first, or a placeholder if it is not known yet."""
    return {name: next(iter(values), None) if _is_literal(values) else _UNKNOWN for name, values in mapped.items()}


def _check_one(index: int, arguments: Mapping[str, Any]) -> None:
    known = {name: value for name, value in arguments.items() if name in OPTIONS}
    try:
        check_each({name: value for name, value in known.items() if value is not _UNKNOWN})
        if all(OPTIONS[name].template for name, value in known.items() if value is _UNKNOWN):
            # Check the combination only if every unknown argument is a template field.
            check_arguments(**known)
    except (ArgumentError, DeadlineError) as error:
        raise type(error)(f"mapped task {index}: {error}") from error


def _check_in_dag(mapped: MappedOperator) -> None:
    """Refuse a ``deadline_of`` that is invalid in this DAG. Raises ArgumentError or DeadlineError."""
    given = mapped.partial_kwargs
    deadline_of = given.get("deadline_of")
    if deadline_of is None:
        return
    check_downstream(deadline_of, mapped)
    takes_time_from_dag = given.get("deadline") is None and not _expands(mapped, "deadline")
    if takes_time_from_dag and mapped.dag is not None:
        check_time_from_dag(mapped.dag, alerts_of(mapped.dag), deadline_of)


def _expands(mapped: MappedOperator, argument: str) -> bool:
    """Whether each mapped task has, or may have, its own value of an argument."""
    values = mapped.expand_input.value
    return not isinstance(values, Mapping) or argument in values


def _common(begun: OperatorPartial) -> dict[str, Any]:
    """Return the arguments common to all mapped tasks: defaults, default_args of the DAG and group, and those given."""
    signature = inspect.signature(begun.operator_class.__init__).parameters
    defaults = {name: one.default for name, one in signature.items() if one.default is not one.empty}
    found = {**DEFAULTS, **defaults}  # a subclass may have defaults of its own
    for owner in (begun.kwargs.get("dag"), begun.kwargs.get("task_group")):
        found.update(getattr(owner, "default_args", None) or {})
    found.update(begun.kwargs)
    return {name: reveal(value) for name, value in found.items() if name in OPTIONS}


def _is_literal(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and not is_late(values)

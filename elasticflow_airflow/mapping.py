"""Mapped training tasks, checked when the DAG is read: what ``partial()`` and ``expand()`` say, as far as it is known.

Airflow makes the operators of a mapped task only when the task runs; without this a mistake would be found only then.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from airflow.sdk.definitions.mappedoperator import MappedOperator, OperatorPartial

from elasticflow_airflow.arguments import CHECKED, MAY_BE_LATE, ArgumentError, check_arguments, check_each, is_late
from elasticflow_airflow.callables import conceal, reveal
from elasticflow_airflow.dag_deadline import alerts_of, check_time_from_dag
from elasticflow_airflow.deadlines import DeadlineError
from elasticflow_airflow.submission import check_downstream

_CALLED = ("on_at_risk", "on_promote")
_UNKNOWN = "{{ mapped }}"
"""Stands for what another task will return."""


class CheckedPartial(OperatorPartial):
    """What ``ElasticTrainOperator.partial()`` returns: Airflow's own, which looks at the arguments before it maps."""

    def _expand(self, expand_input: Any, *, strict: bool) -> MappedOperator:
        try:
            _check(self, expand_input.value)
        except (ArgumentError, DeadlineError):
            self._expand_called = True  # it was; Airflow would warn of the opposite
            raise
        mapped = super()._expand(expand_input, strict=strict)
        # Airflow calls this of each task when the DAG file has been read; a mapped one has no operator by then.
        mapped.resolve_template_files = partial(_check_in_dag, mapped)  # type: ignore[method-assign]
        return mapped


def checked(begun: OperatorPartial) -> CheckedPartial:
    """Take over what Airflow's ``partial()`` made, its callables written so that the DAG can be serialized.

    Raises ArgumentError or DeadlineError.
    """
    begun._expand_called = True  # from here on it is ours that must be mapped
    check_each({name: value for name, value in begun.kwargs.items() if name in CHECKED})
    kwargs = {name: conceal(value) if name in _CALLED else value for name, value in begun.kwargs.items()}
    return CheckedPartial(operator_class=begun.operator_class, kwargs=kwargs, params=begun.params)


def _check(begun: OperatorPartial, mapped: Any) -> None:
    common = _common(begun)
    if isinstance(mapped, Mapping):  # expand(): a list for each argument
        for name, values in mapped.items():
            if _is_literal(values):
                for index, value in enumerate(values):
                    _check_one(index, {**common, **_placeholders(mapped), name: value})
    elif _is_literal(mapped):  # expand_kwargs(): a dict for each task
        for index, one in enumerate(mapped):
            if isinstance(one, Mapping):
                _check_one(index, {**common, **one})


def _placeholders(mapped: Mapping[str, Any]) -> dict[str, Any]:
    """One value for each mapped argument: its first, or something to stand for what is not known yet."""
    return {name: next(iter(values), None) if _is_literal(values) else _UNKNOWN for name, values in mapped.items()}


def _check_one(index: int, arguments: Mapping[str, Any]) -> None:
    known = {name: value for name, value in arguments.items() if name in CHECKED}
    try:
        check_each({name: value for name, value in known.items() if value is not _UNKNOWN})
        if all(name in MAY_BE_LATE for name, value in known.items() if value is _UNKNOWN):
            # Together they are looked at only where everything else is known.
            check_arguments(**known)
    except (ArgumentError, DeadlineError) as error:
        raise type(error)(f"mapped task {index}: {error}") from error


def _check_in_dag(mapped: MappedOperator) -> None:
    """Refuse a ``deadline_of`` that the DAG does not have. Raises ArgumentError or DeadlineError."""
    given = mapped.partial_kwargs
    deadline_of = given.get("deadline_of")
    if deadline_of is None:
        return
    check_downstream(deadline_of, mapped)
    takes_time_from_dag = given.get("deadline") is None and not _expands(mapped, "deadline")
    if takes_time_from_dag and mapped.dag is not None:
        check_time_from_dag(mapped.dag, alerts_of(mapped.dag), deadline_of)


def _expands(mapped: MappedOperator, argument: str) -> bool:
    """Whether each mapped task has a value of its own of an argument, or may have."""
    values = mapped.expand_input.value
    return not isinstance(values, Mapping) or argument in values


def _common(begun: OperatorPartial) -> dict[str, Any]:
    """The arguments of every mapped task: by default, by the DAG's and its groups' default_args, and as given."""
    signature = inspect.signature(begun.operator_class.__init__).parameters
    defaults = {name: one.default for name, one in signature.items() if one.default is not one.empty}
    found: dict[str, Any] = {"global_batch_size": None, **{n: v for n, v in defaults.items() if n in CHECKED}}
    for owner in (begun.kwargs.get("dag"), begun.kwargs.get("task_group")):
        found.update(getattr(owner, "default_args", None) or {})
    found.update(begun.kwargs)
    return {name: reveal(value) for name, value in found.items() if name in CHECKED}


def _is_literal(values: Any) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and not is_late(values)

"""Checks the arguments of an elastic task: at DAG parse what is known then, the rest once rendered.

Pure. Every error names the argument, its value and what to write instead. A template (a string with ``{{``, or the
output of another task) is checked only once it is rendered.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from os import PathLike
from typing import Any, Final

from elasticflow_airflow import bounds
from elasticflow_airflow.api import share_problem, target_problem
from elasticflow_airflow.api.training_options import OPTIONS, ValueKind
from elasticflow_airflow.deadlines.parse import DAG_RUN, DeadlineError, check_deadline
from elasticflow_airflow.requirement_lines import requirement_problem, without_passwords
from elasticflow_airflow.task.callables import listed, problem_of

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED: Final = frozenset(
    f"ELASTICFLOW_{name}" for name in ("SESSION", "WORKER", "GENERATION", "TRAINER_FILE", "CORES", "PARENT_PID")
)
"""Variables that the service sets to configure the runtime."""
_SECRET = re.compile(r"conn:(?P<conn_id>.+?)\.(?P<field>password|login|host|schema|port|extra\.(?P<key>.+))")
_PULL = re.compile(r"xcom_pull\(\s*(?:task_ids\s*=\s*)?\[?\s*['\"]([^'\"]+)['\"]")


class ArgumentError(ValueError):
    """An invalid argument."""


def is_late(value: object) -> bool:
    """Whether a value is known only at run time: a template, or the output of another task."""
    if isinstance(value, str):
        return "{{" in value or "{%" in value
    return hasattr(value, "resolve") and hasattr(value, "iter_references")  # an XComArg


def check_arguments(**given: Any) -> None:
    """Check at DAG parse what is known then: each argument by itself, and combinations that exclude each other.

    ``given`` has a value for each of ``OPTIONS``. Raises ArgumentError or DeadlineError.
    """
    check_each(given)
    for name, option in OPTIONS.items():
        if given[name] is None and option.default not in (None, ...):
            raise ArgumentError(f"{name}=None: give a value, or leave the argument out for its default")
    script, module = given["script"], given["module"]
    if (script is None) == (module is None):
        raise ArgumentError(f"give exactly one of script= and module= (script={script!r}, module={module!r})")
    steps, epochs, batch = given["steps"], given["epochs"], given["global_batch_size"]
    _check_length(steps, epochs, given["samples"], batch)
    _check_target(given["target_loss"], steps, epochs, given["progress_regex"], given["progress_file"])
    _check_deadlines(
        given["deadline"], given["deadline_of"], given["best_effort"], given["latest_deadline"], given["on_reject"]
    )
    least, most = given["min_workers"], given["max_workers"]
    if most is not None and most < least:
        raise ArgumentError(
            f"max_workers={most} is less than min_workers={least}: give at least {least}, or leave max_workers out"
        )
    _check_shares(given["consistency"], given["logical_workers"], batch, least, most)
    twice = set(given["env"] or {}) & set(given["secret_env"] or {}) if isinstance(given["env"], Mapping) else set()
    if twice:
        raise ArgumentError(f"{min(twice)!r} is in env and in secret_env: say it once")


def check_each(given: Mapping[str, Any]) -> None:
    """Check each given argument by itself; None counts as omitted.

    For arguments that are not complete yet: those of ``partial()`` and of a decorated function. Raises ArgumentError or
    DeadlineError.
    """
    for name, value in given.items():
        option = OPTIONS.get(name)
        if value is None or option is None:
            continue
        if not is_late(value) or option.kind is ValueKind.PATTERN:
            _CHECKS[option.kind](name, value)
        elif not option.template:
            raise ArgumentError(
                f"{name}={value!r} is known only at run time, and {name} is no template field: give a value, or let a"
                " function decide it (@task.elastic_train)"
            )


def count(name: str, value: Any, given: Any) -> int | None:
    """Parse a rendered count. Raises ArgumentError for anything but an integer of at least 1."""
    if given is None:
        return None
    present(name, value, given)
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        rendered = f" (rendered from {given!r})" if is_late(given) else ""
        raise ArgumentError(f"{name}={value!r}{rendered} must be a whole number of at least 1")
    _within(name, bounds.count_problem(number, 1, bounds.MOST_SAMPLES if name == "samples" else bounds.MOST_COUNT))
    return number


def _within(name: str, problem: str | None) -> None:
    """Refuse a value that exceeds the service's bounds. Raises ArgumentError unless ``problem`` is None."""
    if problem is not None:
        raise ArgumentError(f"{name}: {problem}")


def target(value: Any, given: Any) -> float | None:
    """Parse a rendered target loss. Raises ArgumentError for anything but a finite number."""
    if given is None:
        return None
    present("target_loss", value, given)
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        rendered = f" (rendered from {given!r})" if is_late(given) else ""
        raise ArgumentError(
            f"target_loss={value!r}{rendered} must be a finite number: the smoothed loss at which training may end"
        )
    _within("target_loss", bounds.loss_problem(number))
    return number


def present(name: str, value: Any, given: Any) -> None:
    """Refuse what a missing XCom renders to: None, or the string ``None`` from a template. Raises ArgumentError.

    The same string is a valid value if the author wrote it or another task returned it.
    """
    template = isinstance(given, str) and is_late(given)
    if given is None or (value is not None and not (template and isinstance(value, str) and value.strip() == "None")):
        return
    if not is_late(given):
        raise ArgumentError(f"{name}={value!r}: give a value, or leave the argument out")
    raise ArgumentError(
        f"{name} rendered to 'None': the upstream task {_upstream(given)} returned nothing for {_source(given)};"
        " is its return value (XCom) there, and is the key right?"
    )


def rendered_texts(name: str, values: Sequence[Any], given: Any) -> tuple[str, ...]:
    """Convert a rendered list to strings. Raises ArgumentError for elements that a missing XCom left empty."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ArgumentError(f"{name}={values!r} must be a list, one element per argument")
    elements = given if isinstance(given, Sequence) and not isinstance(given, str) else [given] * len(values)
    for index, (value, element) in enumerate(zip(values, elements, strict=False)):
        present(f"{name}[{index}]", value, element)
        _check_element(f"{name}[{index}]", value)
    return tuple(str(value) for value in values)


def secret_reference(name: str, reference: Any) -> tuple[str, str, str | None]:
    """Split ``conn:<id>.<field>`` into connection id, field, and key of the extra or None. Raises ArgumentError."""
    match = _SECRET.fullmatch(reference) if isinstance(reference, str) else None
    if match is None:
        # Do not show the value: the author may have written the secret itself.
        raise ArgumentError(
            f"secret_env[{name!r}] must name a field of a connection: 'conn:hub.password', or .login, .host,"
            " .schema, .port, or .extra.<key>; secrets themselves do not belong in a DAG file"
        )
    return match["conn_id"], match["field"].split(".", 1)[0], match["key"]


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ArgumentError(f"{name}={value!r} is a {type(value).__name__}: give a str")
    if not value.strip():
        raise ArgumentError(f"{name}={value!r} is empty: give a value, or leave the argument out")
    _within(name, bounds.text_problem(value, bounds.PATTERN_CHARACTERS))


def _check_path(name: str, value: Any) -> None:
    if isinstance(value, PathLike):
        raise ArgumentError(f"{name}={value!r} is a path object: give a str, which templates and Airflow's UI can show")
    _check_text(name, value)
    _within(name, bounds.path_problem(value))


def _check_args(name: str, value: Any) -> None:
    if isinstance(value, str):
        raise ArgumentError(f"{name}={value!r} is one string: give a list, one element per argument")
    if not isinstance(value, (list, tuple)):
        raise ArgumentError(f"{name}={value!r} is a {type(value).__name__}: give a list, one element per argument")
    for index, element in enumerate(value):
        _check_element(f"{name}[{index}]", element)


def _check_requirements(name: str, value: Any) -> None:
    if isinstance(value, str):
        _check_path(name, value)
        return
    _check_args(name, value)
    for index, line in enumerate(value):
        if not is_late(line):
            _within(f"{name}[{index}]={without_passwords(str(line))!r}", requirement_problem(str(line)))


def _check_element(name: str, element: Any) -> None:
    if element is None or isinstance(element, (list, tuple, set, Mapping)):
        raise ArgumentError(f"{name}={element!r} is a {type(element).__name__}: give text, a number or a template")
    if not is_late(element):
        _within(name, bounds.argument_problem(str(element)))


def _check_pattern(name: str, value: Any) -> None:
    _check_text(name, value)
    problem = bounds.pattern_problem(value)
    if problem is not None:
        raise ArgumentError(f"{name}={value!r} {problem}")


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ArgumentError(f"{name}={value!r} must be True or False")


def _check_choice(name: str, value: Any) -> None:
    choices = OPTIONS[name].choices
    if value not in choices:
        raise ArgumentError(f"{name}={value!r} is none of {', '.join(map(repr, choices))}")


def _check_value(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ArgumentError(f"{name}={value!r} must be a finite number greater than 0")
    _within(name, bounds.number_problem(value, bounds.LEAST_VALUE, bounds.MOST_VALUE))


def _check_callable(name: str, value: Any) -> None:
    problem = problem_of(value)
    if problem is not None:
        raise ArgumentError(f"{name}={value!r} {problem}")


def _check_callables(name: str, value: Any) -> None:
    for one in listed(value):
        _check_callable(name, one)


def _check_duration(name: str, value: Any) -> None:
    if not isinstance(value, timedelta) or value < timedelta(0):
        raise DeadlineError(f"{name}={value!r} must be a timedelta of 0 or more")


def _check_task(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"{name}={value!r} must be the id of a downstream task, or {DAG_RUN!r}")


def _check_length(steps: Any, epochs: Any, samples: Any, global_batch_size: Any) -> None:
    if steps is not None and (epochs is not None or samples is not None):
        raise ArgumentError(
            f"steps={steps!r} stands beside epochs={epochs!r}, samples={samples!r}: give steps, or epochs and samples"
        )
    if global_batch_size is None:
        raise ArgumentError("global_batch_size=None: give the number of samples of one optimizer step")
    if samples is not None and not any(map(is_late, (epochs, samples, global_batch_size))):
        parts = {"epochs": 1 if epochs is None else epochs, "samples": samples, "global_batch_size": global_batch_size}
        numbers = [count(name, value, value) or 1 for name, value in parts.items()]
        _within("length", bounds.total_steps_problem(*numbers))


def _check_target(target_loss: Any, steps: Any, epochs: Any, progress_regex: Any, progress_file: Any) -> None:
    """Refuse a target loss that is not a number, or that has no maximum length beside it."""
    if target_loss is None:
        return
    number = 0.0 if is_late(target_loss) else target(target_loss, target_loss)
    plain = progress_regex is not None or progress_file is not None
    problem = target_problem(number, bounded=steps is not None or epochs is not None, plain=plain)
    if problem is not None:
        raise ArgumentError(problem if not is_late(target_loss) else problem.replace("target_loss=0", "target_loss="))


def _check_deadlines(deadline: Any, deadline_of: Any, best_effort: Any, latest_deadline: Any, on_reject: Any) -> None:
    if best_effort and deadline is not None:
        raise ArgumentError(f"best_effort=True beside deadline={deadline!r}: a job has a deadline or is best effort")
    if best_effort and deadline_of is not None:
        raise ArgumentError(
            f"best_effort=True beside deadline_of={deadline_of!r}: a job has a deadline or is best effort"
        )
    if not best_effort and deadline is None and deadline_of is None:
        raise ArgumentError(
            "neither deadline=, deadline_of= nor best_effort=True: say by when, or that it does not matter"
        )
    if (on_reject in ("renegotiate", "late")) != (latest_deadline is not None):
        raise ArgumentError(
            f'on_reject={on_reject!r}, latest_deadline={latest_deadline!r}: on_reject="renegotiate" and "late" need'
            " latest_deadline=, and nothing else takes it"
        )
    if _is_no_later(latest_deadline, deadline):
        raise ArgumentError(
            f"latest_deadline={latest_deadline!r} is not later than deadline={deadline!r}: give a later one, up to"
            " which a later deadline would be acceptable"
        )


def _is_no_later(latest: Any, deadline: Any) -> bool:
    """Whether two durations, or two datetimes, are known to be in the wrong order; unknown for times of day."""
    if isinstance(deadline, timedelta) and isinstance(latest, timedelta):
        return latest <= deadline
    if not isinstance(deadline, datetime) or not isinstance(latest, datetime):
        return False
    return (deadline.tzinfo is None) == (latest.tzinfo is None) and latest <= deadline


def _check_shares(
    consistency: str, logical_workers: Any, global_batch_size: Any, min_workers: int, max_workers: int | None
) -> None:
    """Refuse shares that do not divide the batch evenly. A batch size that is a template is checked once rendered."""
    batch = None if is_late(global_batch_size) else count("global_batch_size", global_batch_size, global_batch_size)
    if batch is not None:
        problem = share_problem(consistency, logical_workers, batch, min_workers, max_workers)
        if problem is not None:
            raise ArgumentError(problem)


def _check_power_of_two(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1 or number & (number - 1):
        raise ArgumentError(f"{name}={number!r} must be a power of two: 1, 2, 4, 8, ...")
    _within(name, bounds.count_problem(number, 1, bounds.MOST_WORKERS))


def _check_seed(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise ArgumentError(f"{name}={number!r} must be a whole number")
    _within(name, bounds.count_problem(number))


def _check_curve(name: str, curve: Any) -> None:
    if not isinstance(curve, Mapping) or not curve:
        raise ArgumentError(f"{name}={curve!r} must map workers to steps/s, like {{1: 2.0, 2: 3.8}}")
    for workers, speed in curve.items():
        _check_power_of_two(f"a key of {name}", workers)
        if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 < speed < math.inf:
            raise ArgumentError(f"{name}[{workers}]={speed!r} must be steps/s, finite and greater than 0")
        problem = bounds.number_problem(speed, bounds.SLOWEST_STEPS_PER_S, bounds.FASTEST_STEPS_PER_S)
        _within(f"{name}[{workers}]", problem)


def _check_env(argument: str, mapping: Any) -> None:
    _check_names(argument, mapping)
    for name, value in mapping.items():
        _check_element(f"{argument}[{name!r}]", value)


def _check_names(argument: str, mapping: Any) -> None:
    if not isinstance(mapping, Mapping):
        raise ArgumentError(f"{argument} must map names to values, not be a {type(mapping).__name__}")
    for name in mapping:
        if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
            raise ArgumentError(f"{argument} names {name!r}, which is no name of an environment variable")
        if name in _RESERVED:
            raise ArgumentError(f"{argument} names {name!r}, which the service itself sets for each worker")


def _check_secrets(argument: str, mapping: Any) -> None:
    _check_names(argument, mapping)
    for name, reference in mapping.items():
        secret_reference(name, reference)


def _upstream(given: Any) -> str:
    """Name the task that a template or an XComArg reads from, as far as it can be determined."""
    operator = getattr(given, "operator", None)
    if operator is not None:
        return repr(operator.task_id)
    match = _PULL.search(given) if isinstance(given, str) else None
    return repr(match[1]) if match else "it reads from"


def _source(given: Any) -> str:
    return given if isinstance(given, str) else f"XCom {getattr(given, 'key', 'return_value')!r}"


_CHECKS: Final[dict[ValueKind, Callable[[str, Any], object]]] = {
    ValueKind.PATH: _check_path,
    ValueKind.TEXT: _check_text,
    ValueKind.PATTERN: _check_pattern,
    ValueKind.CHOICE: _check_choice,
    ValueKind.SWITCH: _check_switch,
    ValueKind.COUNT: lambda name, value: count(name, value, value),
    ValueKind.POWER_OF_TWO: _check_power_of_two,
    ValueKind.SEED: _check_seed,
    ValueKind.LOSS: lambda _, value: target(value, value),
    ValueKind.VALUE: _check_value,
    ValueKind.MOMENT: lambda name, value: check_deadline(value, name),
    ValueKind.DURATION: _check_duration,
    ValueKind.TASK: _check_task,
    ValueKind.ARGUMENTS: _check_args,
    ValueKind.ENVIRONMENT: _check_env,
    ValueKind.SECRETS: _check_secrets,
    ValueKind.REQUIREMENTS: _check_requirements,
    ValueKind.CURVE: _check_curve,
    ValueKind.CALLABLE: _check_callable,
    ValueKind.CALLABLES: _check_callables,
}
"""The check for each kind of value."""

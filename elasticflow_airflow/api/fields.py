"""The field types of requests, each with its limits (``elasticflow_airflow.bounds``).

A value out of bounds is an error of the type ``OUT_OF_BOUNDS``, whose message states the limit and how to fix it.
Numbers and booleans are not parsed from strings: a client that sends "5" for 5 has a bug.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SecretStr, WithJsonSchema
from pydantic_core import PydanticCustomError

from elasticflow_airflow import bounds
from elasticflow_airflow.requirement_lines import requirement_problem

OUT_OF_BOUNDS = "out_of_bounds"
TOO_FAR_AHEAD = "too_far_ahead"
"""Error type of a time that is too far ahead by the clock of the validating process."""


def refuse(problem: str | None) -> None:
    """Raise an error that pydantic reports for the field, unless ``problem`` is None."""
    if problem is not None:
        raise PydanticCustomError(OUT_OF_BOUNDS, "{problem}", {"problem": problem})


def bounded(problem_of: Callable[[Any], str | None]) -> AfterValidator:
    """Return a validator that refuses a value for which ``problem_of`` returns a problem."""

    def check(value: Any) -> Any:
        refuse(problem_of(value))
        return value

    return AfterValidator(check)


def _number(least: float, most: float, *, above: bool = False) -> tuple[AfterValidator, WithJsonSchema]:
    low = "exclusiveMinimum" if above else "minimum"
    schema = {"type": "number", low: least, "maximum": most}
    return bounded(lambda value: bounds.number_problem(value, least, most, above=above)), WithJsonSchema(schema)


def _count(least: int, most: int) -> tuple[AfterValidator, WithJsonSchema]:
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return bounded(lambda value: bounds.count_problem(value, least, most)), WithJsonSchema(schema)


def _text(most: int, problem_of: Callable[[str], str | None] | None = None) -> tuple[AfterValidator, WithJsonSchema]:
    schema = {"type": "string", "maxLength": most, "pattern": r"^[^\u0000]*$"}
    return bounded(problem_of or (lambda text: bounds.text_problem(text, most))), WithJsonSchema(schema)


_STRICT = Field(strict=True)

Switch = Annotated[bool, _STRICT]


def _not_too_far(at_s: float) -> float:
    """Has an error type of its own, so that a stored message is not rejected because the limit has moved with time."""
    problem = bounds.ahead_problem(at_s, time.time())
    if problem is not None:
        raise PydanticCustomError(TOO_FAR_AHEAD, "{problem}", {"problem": problem})
    return at_s


UtcSeconds = Annotated[
    float,
    _STRICT,
    bounded(bounds.time_problem),
    AfterValidator(_not_too_far),
    WithJsonSchema({"type": "number", "minimum": bounds.EARLIEST_S, "maximum": bounds.LATEST_S}),
]
DurationS = Annotated[float, _STRICT, *_number(0.0, bounds.LONGEST_S, above=True)]
"""A duration such as a lease, in seconds: more than 0."""
HorizonH = Annotated[float, _STRICT, *_number(0.0, 24.0 * 14, above=True)]
"""How many hours ahead a request asks about."""
StepCount = Annotated[int, _STRICT, *_count(1, bounds.MOST_COUNT)]
"""Number of steps, of epochs, or of samples in a batch: at least one."""
SampleCount = Annotated[int, _STRICT, *_count(1, bounds.MOST_SAMPLES)]
WorkerCount = Annotated[int, _STRICT, *_count(1, bounds.MOST_WORKERS)]
CurveSize = Annotated[int, *_count(1, bounds.MOST_WORKERS)]
"""A worker count as a key of a JSON object, where every key is a string."""
Seed = Annotated[int, _STRICT, *_count(0, bounds.MOST_COUNT)]
NodeCount = Annotated[int, _STRICT, *_count(0, bounds.MOST_NODES)]
Counter = Annotated[int, _STRICT, *_count(0, bounds.MOST_COUNT)]
"""A claim, or another number that starts at 0."""
MapIndex = Annotated[int, _STRICT, *_count(-1, bounds.MOST_COUNT)]
Value = Annotated[float, _STRICT, *_number(bounds.LEAST_VALUE, bounds.MOST_VALUE)]
Speed = Annotated[float, _STRICT, *_number(bounds.SLOWEST_STEPS_PER_S, bounds.FASTEST_STEPS_PER_S)]
Loss = Annotated[float, _STRICT, *_number(-bounds.LARGEST_LOSS, bounds.LARGEST_LOSS)]
Name = Annotated[str, *_text(bounds.NAME_CHARACTERS)]
"""An Airflow id, a job id or a node id."""
Sentence = Annotated[str, *_text(bounds.TEXT_CHARACTERS)]
"""A reason."""
LongText = Annotated[str, *_text(bounds.PATTERN_CHARACTERS)]
"""A regular expression, or a label's value."""
Requirement = Annotated[str, *_text(bounds.REQUIREMENT_CHARACTERS), bounded(requirement_problem)]
"""A line of a requirements file."""
PathText = Annotated[str, *_text(bounds.PATH_BYTES, bounds.path_problem)]
Argument = Annotated[str, *_text(bounds.ARGUMENT_BYTES, bounds.argument_problem)]
SecretValue = Annotated[SecretStr, bounded(lambda secret: bounds.argument_problem(secret.get_secret_value()))]

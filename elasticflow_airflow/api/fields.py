"""The types of what requests hold, each with its limits (``elasticflow_airflow.bounds``).

A value out of bounds is an error of the type ``OUT_OF_BOUNDS``, whose message says the limit and what to do. Numbers
and switches are not read from texts: whoever sends "5" for 5 has made a mistake somewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SecretStr, WithJsonSchema
from pydantic_core import PydanticCustomError

from elasticflow_airflow import bounds

OUT_OF_BOUNDS = "out_of_bounds"
TOO_FAR_AHEAD = "too_far_ahead"
"""The same of a time, by the clock of whoever looks at it."""


def refuse(problem: str | None) -> None:
    """Raise what pydantic makes an error of the field of, where there is a problem."""
    if problem is not None:
        raise PydanticCustomError(OUT_OF_BOUNDS, "{problem}", {"problem": problem})


def bounded(problem_of: Callable[[Any], str | None]) -> AfterValidator:
    """Refuse a value of which something is wrong."""

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
    """Of a kind of its own: what was taken in once is not given up because time limits are others now."""
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
"""Of a lease, say: more than 0."""
HorizonH = Annotated[float, _STRICT, *_number(0.0, 24.0 * 14, above=True)]
"""How many hours a question looks ahead."""
StepCount = Annotated[int, _STRICT, *_count(1, bounds.MOST_COUNT)]
"""Steps, epochs, or samples of a batch: at least one."""
SampleCount = Annotated[int, _STRICT, *_count(1, bounds.MOST_SAMPLES)]
WorkerCount = Annotated[int, _STRICT, *_count(1, bounds.MOST_WORKERS)]
CurveSize = Annotated[int, *_count(1, bounds.MOST_WORKERS)]
"""The same as a key of a JSON object, where every key is a text."""
Seed = Annotated[int, _STRICT, *_count(0, bounds.MOST_COUNT)]
NodeCount = Annotated[int, _STRICT, *_count(0, bounds.MOST_NODES)]
Counter = Annotated[int, _STRICT, *_count(0, bounds.MOST_COUNT)]
"""A claim, or another number that begins at 0."""
MapIndex = Annotated[int, _STRICT, *_count(-1, bounds.MOST_COUNT)]
Value = Annotated[float, _STRICT, *_number(bounds.LEAST_VALUE, bounds.MOST_VALUE)]
Speed = Annotated[float, _STRICT, *_number(bounds.SLOWEST_STEPS_PER_S, bounds.FASTEST_STEPS_PER_S)]
Loss = Annotated[float, _STRICT, *_number(-bounds.LARGEST_LOSS, bounds.LARGEST_LOSS)]
Name = Annotated[str, *_text(bounds.NAME_CHARACTERS)]
"""An id of Airflow, of a job, of a node."""
Sentence = Annotated[str, *_text(bounds.TEXT_CHARACTERS)]
"""A reason."""
LongText = Annotated[str, *_text(bounds.PATTERN_CHARACTERS)]
"""A regular expression, or a label's value."""
PathText = Annotated[str, *_text(bounds.PATH_BYTES, bounds.path_problem)]
Argument = Annotated[str, *_text(bounds.ARGUMENT_BYTES, bounds.argument_problem)]
SecretValue = Annotated[SecretStr, bounded(lambda secret: bounds.argument_problem(secret.get_secret_value()))]

"""What the numbers and texts that others give may be: the limits, and what to do where one is exceeded.

Everything that comes from outside is held to these: requests (``api.fields``), reports and progress files of training
scripts, manifests of checkpoints. They are what the store's columns, a file system, a process and floats can hold, so
that nobody's number can break what is worked out for all. Pure, and the standard library only: supervisors and training
interpreters use it as well.

Each function returns what is wrong with a value and what to do about it, or None when all is well. A value is quoted
only where it is a number: a text may be a secret.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

EARLIEST_S: Final = 0.0
LATEST_S: Final = datetime(2100, 1, 1, tzinfo=UTC).timestamp()
"""Times are between 1970 and the year 2100, in UTC seconds."""
LONGEST_S: Final = 10 * 366 * 86400.0
"""Ten years: no lease, and nothing else that lasts, is longer."""
MOST_COUNT: Final = 2**31 - 1
"""What an integer column holds (PostgreSQL has 32 bits): steps, epochs, claims, sizes of batches."""
MOST_SAMPLES: Final = 2**53
"""Up to here a float counts exactly."""
MOST_BYTES: Final = 2**63 - 1
"""What a column of 64 bits holds."""
MOST_WORKERS: Final = 2**20
MOST_NODES: Final = 1000
"""How many more nodes a question may try on."""
LEAST_VALUE: Final = 1e-9
MOST_VALUE: Final = 1e12
"""What a deadline may be worth: values are multiplied, divided and added up."""
SLOWEST_STEPS_PER_S: Final = 1e-9
FASTEST_STEPS_PER_S: Final = 1e9
LARGEST_LOSS: Final = 1e38
"""About what 32 bits of a float hold; its square is a float, too."""
NAME_CHARACTERS: Final = 250
"""As long as Airflow's ids may be."""
KEY_BYTES: Final = 1600
"""The ids of a task together, as JSON: they are indexed, and an index entry of PostgreSQL has 2,704 bytes at most."""
TEXT_CHARACTERS: Final = 2000
"""A reason, or another sentence."""
MESSAGE_CHARACTERS: Final = 20_000
"""What a training says of its end: a traceback."""
PATTERN_CHARACTERS: Final = 4096
PATH_BYTES: Final = 4096
COMPONENT_BYTES: Final = 255
"""What Linux takes: a path, and what stands between two slashes of it."""
ARGUMENT_BYTES: Final = 128 * 1024 - 1
"""What Linux takes: one argument of a program, or one environment variable with its name."""
COMMAND_BYTES: Final = 1024 * 1024
"""All arguments and environment variables of a script together: Linux takes 2 MiB with all that is there already."""
MOST_ARGUMENTS: Final = 10_000
MOST_LABELS: Final = 100
METRICS_BYTES: Final = 64 * 1024
METRICS_DEPTH: Final = 16
_YEAR_S: Final = 366 * 86400.0


def time_problem(at_s: float) -> str | None:
    """What is wrong with a time in UTC seconds."""
    if not _finite(at_s):
        return "must be a finite number: give UTC seconds"
    if EARLIEST_S <= at_s <= LATEST_S:
        return None
    said = f"{shown(at_s)} is no time between 1970 and 2100 ({EARLIEST_S:.0f} to {LATEST_S:.0f}): give UTC seconds"
    for name, factor in (("milliseconds", 1e3), ("microseconds", 1e6), ("nanoseconds", 1e9)):
        if LATEST_S / 100 * factor <= at_s <= LATEST_S * factor:
            return f"{said}; these look like {name}: divide them by {factor:.0f}"
    return said


def ahead_problem(at_s: float, now_s: float) -> str | None:
    """What is wrong with a time that may be long ago, and not many years ahead."""
    problem = time_problem(at_s)
    if problem is not None or at_s <= now_s + LONGEST_S:
        return problem
    years = (at_s - now_s) / _YEAR_S
    return (
        f"{shown(at_s)} is {years:.0f} years ahead, and may be {LONGEST_S / _YEAR_S:.0f}: give UTC seconds of earlier"
    )


def number_problem(
    value: float, least: float, most: float, unit: str = "", *, above: bool = False, remedy: str = ""
) -> str | None:
    """What is wrong with a number of ``least`` (``above``: more than that) to ``most``."""
    remedy = remedy or ("give less" if value > most else "give more")
    unit = unit and f" {unit}"
    side = "more than" if above else "at least"
    if not _finite(value):
        return f"must be a finite number: give {side} {shown(least)} and at most {shown(most)}{unit}"
    if (least < value if above else least <= value) and value <= most:
        return None
    bound = f"at most {shown(most)}{unit}" if value > most else f"{side} {shown(least)}{unit}"
    return f"{shown(value)} must be {bound}: {remedy}"


def count_problem(value: int, least: int = 0, most: int = MOST_COUNT) -> str | None:
    """What is wrong with a whole number."""
    return number_problem(value, least, most)


def total_steps_problem(epochs: int, samples: int, global_batch_size: int) -> str | None:
    """What is wrong with a length in epochs: its steps are counted, too."""
    steps = epochs * -(-samples // global_batch_size)
    if steps <= MOST_COUNT:
        return None
    return (
        f"epochs={shown(epochs)} of samples={shown(samples)} with global_batch_size={shown(global_batch_size)} are"
        f" {shown(steps)} steps, and there may be {MOST_COUNT} at most: give fewer epochs, or a larger batch"
    )


def loss_problem(loss: float) -> str | None:
    """What is wrong with a loss. One that is no number is for others to judge: it says that the training diverged."""
    if abs(loss) <= LARGEST_LOSS or not _finite(loss):
        return None
    return f"{shown(loss)} must be between -{LARGEST_LOSS:g} and {LARGEST_LOSS:g}: divide it, or report another number"


def text_problem(text: str, most: int = TEXT_CHARACTERS) -> str | None:
    """What is wrong with a text of at most so many characters, which must be storable, and fit for any program."""
    if len(text) > most:
        return f"has {len(text)} characters, and may have {most}: shorten it"
    at = text.find("\0")
    if at >= 0:
        return f"has a NUL character at position {at}: leave it out"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has half of a surrogate pair at position {error.start}, which is no character: leave it out"
    return None


def pattern_problem(pattern: str) -> str | None:
    """What is wrong with the regular expression that finds the step in a script's output."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    return None if groups else "has no group: write (?P<step>\\d+) where the step is"


def path_problem(path: str) -> str | None:
    """What is wrong with a path of Linux."""
    problem = text_problem(path, PATH_BYTES)
    if problem is not None:
        return problem
    length = len(path.encode())
    if length > PATH_BYTES:
        return f"has {length} bytes, and a path has {PATH_BYTES} at most: shorten it"
    component = max(len(part.encode()) for part in path.split("/"))
    if component > COMPONENT_BYTES:
        return f"has a component of {component} bytes, and a file's name has {COMPONENT_BYTES} at most: shorten it"
    return None


def argument_problem(text: str) -> str | None:
    """What is wrong with an argument of a program, or with a variable of its environment."""
    problem = text_problem(text, ARGUMENT_BYTES)
    if problem is None and len(text.encode()) > ARGUMENT_BYTES:
        return f"has {len(text.encode())} bytes, and may have {ARGUMENT_BYTES}: put it into a file"
    return problem


def environment_problem(what: str, environment: Mapping[str, str]) -> str | None:
    """What is wrong with variables of a program's environment; neither names nor values are told."""
    for number, (name, value) in enumerate(environment.items(), 1):
        if not name or "=" in name:
            return f"{what}: variable {number} has a name that is empty or holds '=': no program could read it"
        problem = argument_problem(f"{name}={value}")
        if problem is not None:
            return f"{what}: variable {number} {problem}"
    return None


def command_problem(args: Iterable[str], environment: Mapping[str, str]) -> str | None:
    """What is wrong with the arguments and the environment of a program, taken together."""
    words = [*args, *(f"{name}={value}" for name, value in environment.items())]
    length = sum(len(word.encode()) + 1 for word in words)
    if length <= COMMAND_BYTES:
        return None
    return f"args, env and secret_env have {length} bytes together, and may have {COMMAND_BYTES}: put them into files"


def key_problem(namespace: str, dag_id: str, task_id: str) -> str | None:
    """What is wrong with the ids of a task, taken together."""
    length = len(json.dumps([namespace, dag_id, task_id]))
    if length <= KEY_BYTES:
        return None
    return (
        f"namespace, dag_id and task_id have {length} bytes together as JSON (six or more for each letter that is not"
        f" ASCII), and may have {KEY_BYTES}: shorten them"
    )


def json_problem(value: Any, depth: int = METRICS_DEPTH, size: int = METRICS_BYTES) -> str | None:
    """What is wrong with a JSON value that is kept: its depth, its size as text, its numbers, its texts."""
    level: list[Any] = [value]
    for _ in range(depth + 1):
        deeper: list[Any] = []
        for one in level:
            if isinstance(one, float) and not math.isfinite(one):
                return "holds a number that is not finite: leave it out, or give it as a text"
            problem = text_problem(one, size) if isinstance(one, str) else None
            if problem is not None:
                return f"holds a text that {problem}"
            if isinstance(one, Mapping):
                deeper += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple):
                deeper += one
        if not deeper:
            break
        level = deeper
    else:
        return f"is nested more than {depth} deep: flatten it"
    try:
        length = len(json.dumps(value))
    except (TypeError, ValueError):
        return "is no JSON: give numbers, texts, lists and objects"
    return f"has {length} bytes as JSON, and may have {size}: shorten it" if length > size else None


def clean_text(text: str, most: int = MESSAGE_CHARACTERS, *, tail: bool = False) -> str:
    """The text as it can be kept: its first characters, or with ``tail`` its last ones; what is none becomes a mark."""
    if len(text) > most:
        text = f"... {text[-most:]}" if tail else f"{text[:most]} ..."
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def shown(number: float) -> str:
    """A number for a sentence, however large it is."""
    if isinstance(number, int) and abs(number) >= 10**18:
        digits = int(number.bit_length() * math.log10(2))
        return f"{'-' if number < 0 else ''}about 1e{digits}"
    return f"{number:.15g}"


def _finite(number: float) -> bool:
    """Whether a number is finite; a whole number is, also one that no float can hold."""
    return isinstance(number, int) or math.isfinite(number)

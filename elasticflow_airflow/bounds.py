"""Limits on numbers and strings from outside, and checks that say how to fix a value that exceeds one.

Everything that comes from outside is checked against them: requests (``api.fields``), reports and progress files of
training scripts, checkpoint manifests. The limits are what the store's columns, a file system, a process and floats can
hold, so that one client's value cannot break the scheduling of all jobs. Pure, and uses the standard library only:
supervisors and training interpreters import it as well.

Each ``*_problem`` function returns what is wrong with a value and how to fix it, or None if the value is valid. A
message quotes a value only if it is a number, because a string may be a secret.
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
"""Ten years: the upper limit of leases and all other durations."""
MOST_COUNT: Final = 2**31 - 1
"""Maximum of an integer column (32 bits in PostgreSQL): steps, epochs, claims, batch sizes."""
MOST_SAMPLES: Final = 2**53
"""Up to this number a float represents every integer exactly."""
MOST_BYTES: Final = 2**63 - 1
"""Maximum of a 64-bit integer column."""
MOST_WORKERS: Final = 2**20
MOST_NODES: Final = 1000
"""How many extra nodes a what-if request may assume."""
LEAST_VALUE: Final = 1e-9
MOST_VALUE: Final = 1e12
"""Bounds of a job's value: values are multiplied, divided and summed."""
SLOWEST_STEPS_PER_S: Final = 1e-9
FASTEST_STEPS_PER_S: Final = 1e9
LARGEST_LOSS: Final = 1e38
"""About the largest 32-bit float; its square still fits a 64-bit float."""
NAME_CHARACTERS: Final = 250
"""Maximum length of Airflow's ids."""
SEARCH_PATTERN: Final = r"^\s*([^\s\x00]+(\s+|$)){0,10}$"
"""At most ten words to search jobs for: each is sought in several columns of all jobs."""
KEY_BYTES: Final = 1600
"""Limit of a task's ids together, as JSON: they are indexed, and a PostgreSQL index entry has at most 2,704 bytes."""
TEXT_CHARACTERS: Final = 2000
"""Limit of a reason or another sentence."""
MESSAGE_CHARACTERS: Final = 20_000
"""Limit of a training's final message, such as a traceback."""
PATTERN_CHARACTERS: Final = 4096
PATH_BYTES: Final = 4096
COMPONENT_BYTES: Final = 255
"""Linux limits of a path and of one path component."""
ARGUMENT_BYTES: Final = 128 * 1024 - 1
"""Linux limit of one program argument, or of one environment variable including its name."""
COMMAND_BYTES: Final = 1024 * 1024
"""Limit of all arguments and environment variables of a script; Linux takes 2 MiB including those already set."""
MOST_ARGUMENTS: Final = 10_000
MOST_REQUIREMENTS: Final = 1000
REQUIREMENT_CHARACTERS: Final = 8000
"""A requirement may name the hash of each of its files."""
MOST_LABELS: Final = 100
METRICS_BYTES: Final = 64 * 1024
METRICS_DEPTH: Final = 16
_YEAR_S: Final = 366 * 86400.0


def time_problem(at_s: float) -> str | None:
    """Return what is wrong with a time in UTC seconds, or None."""
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
    """Return what is wrong with a time that may lie in the past but not many years ahead, or None."""
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
    """Return what is wrong with a number from ``least`` (with ``above``: excluding it) to ``most``, or None."""
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
    """Return what is wrong with an integer, or None."""
    return number_problem(value, least, most)


def total_steps_problem(epochs: int, samples: int, global_batch_size: int) -> str | None:
    """Return what is wrong with a length in epochs, or None: its total number of steps is limited, too."""
    steps = epochs * -(-samples // global_batch_size)
    if steps <= MOST_COUNT:
        return None
    return (
        f"epochs={shown(epochs)} of samples={shown(samples)} with global_batch_size={shown(global_batch_size)} are"
        f" {shown(steps)} steps, and there may be {MOST_COUNT} at most: give fewer epochs, or a larger batch"
    )


def loss_problem(loss: float) -> str | None:
    """Return what is wrong with a loss, or None. NaN and infinity pass: callers treat them as a diverged training."""
    if abs(loss) <= LARGEST_LOSS or not _finite(loss):
        return None
    return f"{shown(loss)} must be between -{LARGEST_LOSS:g} and {LARGEST_LOSS:g}: divide it, or report another number"


def text_problem(text: str, most: int = TEXT_CHARACTERS) -> str | None:
    """Return what is wrong with a string of at most ``most`` characters, or None.

    It must be storable and usable as a program argument: no NUL character, no unpaired surrogate.
    """
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
    """Return what is wrong with the regular expression that finds the step in a script's output, or None."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    return None if groups else "has no group: write (?P<step>\\d+) where the step is"


def path_problem(path: str) -> str | None:
    """Return what is wrong with a Linux path, or None."""
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
    """Return what is wrong with a program argument or a ``NAME=value`` environment variable, or None."""
    problem = text_problem(text, ARGUMENT_BYTES)
    if problem is None and len(text.encode()) > ARGUMENT_BYTES:
        return f"has {len(text.encode())} bytes, and may have {ARGUMENT_BYTES}: put it into a file"
    return problem


def environment_problem(what: str, environment: Mapping[str, str]) -> str | None:
    """Return what is wrong with environment variables, or None; the message reveals neither names nor values."""
    for number, (name, value) in enumerate(environment.items(), 1):
        if not name or "=" in name:
            return f"{what}: variable {number} has a name that is empty or holds '=': no program could read it"
        problem = argument_problem(f"{name}={value}")
        if problem is not None:
            return f"{what}: variable {number} {problem}"
    return None


def command_problem(args: Iterable[str], environment: Mapping[str, str]) -> str | None:
    """Return what is wrong with the total size of a program's arguments and environment, or None."""
    words = [*args, *(f"{name}={value}" for name, value in environment.items())]
    length = sum(len(word.encode()) + 1 for word in words)
    if length <= COMMAND_BYTES:
        return None
    return f"args, env and secret_env have {length} bytes together, and may have {COMMAND_BYTES}: put them into files"


def key_problem(namespace: str, dag_id: str, task_id: str) -> str | None:
    """Return what is wrong with the total length of a task's ids, or None."""
    length = len(json.dumps([namespace, dag_id, task_id]))
    if length <= KEY_BYTES:
        return None
    return (
        f"namespace, dag_id and task_id have {length} bytes together as JSON (six or more for each letter that is not"
        f" ASCII), and may have {KEY_BYTES}: shorten them"
    )


def json_problem(value: Any) -> str | None:
    """Return what is wrong with a JSON value to store, or None: depth, serialised size, numbers and strings."""
    level: list[Any] = [value]
    for _ in range(METRICS_DEPTH + 1):
        deeper: list[Any] = []
        for one in level:
            if isinstance(one, float) and not math.isfinite(one):
                return "holds a number that is not finite: leave it out, or give it as a text"
            problem = text_problem(one, METRICS_BYTES) if isinstance(one, str) else None
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
        return f"is nested more than {METRICS_DEPTH} deep: flatten it"
    try:
        length = len(json.dumps(value))
    except (TypeError, ValueError):
        return "is no JSON: give numbers, texts, lists and objects"
    if length <= METRICS_BYTES:
        return None
    return f"has {length} bytes as JSON, and may have {METRICS_BYTES}: shorten it"


def clean_text(text: str, most: int = MESSAGE_CHARACTERS, *, tail: bool = False) -> str:
    """Return the text in storable form: its first ``most`` characters, or with ``tail`` the last ones.

    Characters that cannot be stored are replaced.
    """
    if len(text) > most:
        text = f"... {text[-most:]}" if tail else f"{text[:most]} ..."
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def shown(number: float) -> str:
    """Format a number for a message, however large it is."""
    if isinstance(number, int) and abs(number) >= 10**18:
        digits = int(number.bit_length() * math.log10(2))
        return f"{'-' if number < 0 else ''}about 1e{digits}"
    return f"{number:.15g}"


def _finite(number: float) -> bool:
    """Whether a number is finite; an integer always is, even one that no float can hold."""
    return isinstance(number, int) or math.isfinite(number)

"""Values that nobody expects, drawn at random: for what runs on and on, where hypothesis has nothing to shrink."""

from __future__ import annotations

import random
from typing import Any

import sqlalchemy as sa

from support.raw_columns import holds_json

SNAPSHOT_ENV = "TEST_SNAPSHOT"
"""Environment variable of schemathesis: the code that its submits name (schemathesis_hooks.py)."""
SPARED_ENV = "TEST_SPARED"
"""How the ids of jobs begin that others follow: it finds them in lists, and would attach to them and cancel them."""
NUMBERS = [0, -1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 10**19, 10**400, 1e-300, 1e30, -1e300, 1.8e12, float("inf")]
TEXTS = ["", " ", "\0", "a\0b", "../../etc/passwd", "é" * 300, "x" * 5000, "\x1b[2J", "nan", "1e30", "{}", "\ud800"]


def value(chance: random.Random, depth: int = 2) -> Any:
    """Anything that JSON knows, and numbers that it does not."""
    if depth and chance.random() < 0.2:
        inner = [value(chance, depth - 1) for _ in range(chance.randrange(3))]
        return inner if chance.random() < 0.5 else {str(n): one for n, one in enumerate(inner)}
    return chance.choice([None, True, False, *NUMBERS, *TEXTS])


def storable(chance: random.Random, column: sa.Column[Any]) -> Any:
    """What a column takes, whether it means something or not."""
    kind = column.type
    if holds_json(column):
        found = [one for one in (value(chance) for _ in range(20)) if _is_plain(one)]
        return found[0] if found and found[0] is not None else {}
    if isinstance(kind, sa.Boolean):
        return chance.random() < 0.5
    if isinstance(kind, sa.Integer):
        return chance.choice([-1, 0, 1, 2**31 - 1])
    if isinstance(kind, sa.Float):
        return chance.choice([0.0, -1.0, 1e30, -1e300, 1e-300, 1.8e12])
    if isinstance(kind, sa.LargeBinary):
        return chance.randbytes(5)
    return chance.choice(["", " ", "sleeping", "é" * 8, "\x1b[2J", "1e30"])


def _is_plain(one: Any) -> bool:
    if isinstance(one, list | dict):
        return all(map(_is_plain, one.values() if isinstance(one, dict) else one))
    if isinstance(one, str):
        return "\0" not in one and one.isprintable()
    return not isinstance(one, int | float) or abs(one) < 1e300

"""The notice that a machine goes away: a file, written by whoever hears of it (a script that asks the cloud)."""

from __future__ import annotations

import math
from pathlib import Path

LONGEST_S = 30 * 24 * 3600.0
_MOST_BYTES = 64


def leaving_at(notice: Path | None) -> float | None:
    """Return when the machine goes away (UTC seconds, by its clock); None while there is no notice.

    The file holds the seconds from its last change until then; without a number, it is at once.
    """
    if notice is None:
        return None
    try:
        changed_s = notice.stat().st_mtime
        with notice.open("rb") as file:
            text = file.read(_MOST_BYTES)
    except OSError:
        return None
    try:
        left_s = float(text)
    except ValueError:
        left_s = 0.0
    return changed_s + (min(max(left_s, 0.0), LONGEST_S) if math.isfinite(left_s) else 0.0)

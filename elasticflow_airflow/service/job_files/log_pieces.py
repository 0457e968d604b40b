"""Reads pieces of workers' logs for display: by byte offset, in whole characters, without the secrets of their job.

A secret that crosses the border of two pieces appears in neither: both ends are read with a margin as long as a secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from elasticflow_airflow.api import LogPiece
from elasticflow_airflow.api.insight import REDACTED
from elasticflow_airflow.engines.port import LogChunk
from elasticflow_airflow.service.secrets import worth_hiding

Read = Callable[[int, int], LogChunk]
"""Called with a byte offset and the most bytes to return."""


def read_piece(read: Read, offset: int, limit: int, secrets: Iterable[str]) -> LogPiece:
    """Return at most ``limit`` bytes of the log from a byte offset on. Raises what ``read`` raises."""
    hidden = [value.encode() for value in worth_hiding(secrets)]
    beyond = max(map(len, hidden), default=1) - 1
    before = min(beyond, offset)
    found = read(offset - before, before + limit + beyond)
    base = found.start_offset
    start = min(max(offset, base), base + len(found.data))
    end = min(start + limit, base + len(found.data))
    at_end = found.end_of_file and end == base + len(found.data)
    if not found.end_of_file:
        end = max(start, min(end, base + _begun(found.data, hidden)))
    if not at_end:
        end = start + len(_whole_characters(found.data[start - base : end - base]))
    shown = _without(found.data, start - base, end - base, hidden)
    return LogPiece(text=shown.decode(errors="replace"), start_offset=start, next_offset=end, end_of_file=at_end)


def _without(data: bytes, start: int, end: int, hidden: list[bytes]) -> bytes:
    """Return ``data[start:end]`` with every secret replaced that lies in it, in whole or in part."""
    pieces, at = [], start
    for first, last in _merged(sorted(_places(data, hidden))):
        if last <= start or first >= end:
            continue
        pieces.append(data[at : max(at, first)])
        if first >= start:  # otherwise the previous piece has shown the mark
            pieces.append(REDACTED.encode())
        at = min(last, end)
    return b"".join([*pieces, data[at:end]])


def _places(data: bytes, hidden: list[bytes]) -> Iterator[tuple[int, int]]:
    for value in hidden:
        for match in re.finditer(b"(?=" + re.escape(value) + b")", data):
            yield match.start(), match.start() + len(value)


def _merged(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in places:
        if merged and first < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _begun(data: bytes, hidden: list[bytes]) -> int:
    """Return where a secret begins that is not written completely yet (left for the next piece), or else the end."""
    ends = [len(data) - length for value in hidden for length in range(1, len(value)) if data.endswith(value[:length])]
    return max(0, min(ends, default=len(data)))


def _whole_characters(data: bytes) -> bytes:
    """Cut off an incomplete last character, for the next piece; bytes that are not UTF-8 stay."""
    for back in range(1, min(4, len(data))):
        byte = data[-back]
        if 0xC0 <= byte < 0xF8:  # The first of several bytes.
            wanted = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if back < wanted else data
        if byte & 0xC0 != 0x80:
            break
    return data

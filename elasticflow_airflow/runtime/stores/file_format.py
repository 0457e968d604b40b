"""The file format of checkpoints: tensors as raw bytes, each with a digest, then a JSON index, then a trailer.

::

    magic (16 bytes)
    bytes of a tensor, zero bytes up to a multiple of 64, bytes of the next tensor, ...
    index: JSON, {"version", "byteorder", "state", "tensors": [[numbers, dtype, shape, offset, nbytes, sha256], ...]}
    trailer: position of the index, its SHA-256, end magic (56 bytes)

A file is written from front to back, so that it can be streamed to an object store. Every byte is checked: by a
tensor's digest, by the digest of the index, or by having only one legal value. Nothing in it is ever executed. This
module knows only bytes, and leaves dtypes to torch. May import the standard library only.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

MAGIC = b"\x89ElasticFlow\r\n\x1a\n"
END_MAGIC = b"EFSTATE\n"
VERSION = 1
ALIGNMENT = 64
CHUNK_BYTES = 4 << 20
_TRAILER = struct.Struct("<QQ32s8s")


class ContainerError(ValueError):
    """A file is not a complete container; the message states the problem."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A tensor to be written. ``numbers``: which tensors of the state it is (several if they share memory)."""

    numbers: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Extent:
    """The location and digest of a tensor in a file."""

    numbers: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of a file. ``state`` describes how to reassemble the tensors; None in all parts but the first."""

    state: Any
    extents: tuple[Extent, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Written:
    """A finished file. ``digest`` is the digest of the index, and thereby covers every byte."""

    digest: str
    size_bytes: int


def write(stream: BinaryIO, state: Any, blobs: Sequence[Blob]) -> Written:
    """Write a container to a stream from front to back. Raises OSError if the write fails."""
    stream.write(MAGIC)
    position = len(MAGIC)
    entries = []
    for blob in blobs:
        padding = -position % ALIGNMENT
        stream.write(bytes(padding))
        position += padding
        digest = hashlib.sha256()
        for start in range(0, len(blob.data), CHUNK_BYTES):
            chunk = blob.data[start : start + CHUNK_BYTES]
            digest.update(chunk)
            stream.write(chunk)
        entries.append([blob.numbers, blob.dtype, blob.shape, position, len(blob.data), digest.hexdigest()])
        position += len(blob.data)
    body = {"version": VERSION, "byteorder": sys.byteorder, "state": state, "tensors": entries}
    index = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    index_digest = hashlib.sha256(index)
    stream.write(index)
    stream.write(_TRAILER.pack(position, len(index), index_digest.digest(), END_MAGIC))
    return Written(index_digest.hexdigest(), position + len(index) + _TRAILER.size)


def read_index(stream: BinaryIO) -> Index:
    """Read the index of a seekable stream, and check that the index and its tensor positions are valid.

    The bytes of the tensors are not read. Raises ContainerError.
    """
    size = stream.seek(0, 2)
    if size < len(MAGIC) + _TRAILER.size:
        raise ContainerError(f"has {size} bytes, too few for a container")
    stream.seek(0)
    if stream.read(len(MAGIC)) != MAGIC:
        raise ContainerError("does not begin as a container")
    stream.seek(size - _TRAILER.size)
    at, length, digest, end = _TRAILER.unpack(stream.read(_TRAILER.size))
    if end != END_MAGIC:
        raise ContainerError("does not end as a container (torn or overwritten)")
    if at < len(MAGIC) or at + length + _TRAILER.size != size:
        raise ContainerError("its trailer is damaged")
    stream.seek(at)
    raw = stream.read(length)
    if hashlib.sha256(raw).digest() != digest:
        raise ContainerError("its index is damaged (SHA-256 differs)")
    try:
        body = json.loads(raw)
        if body["version"] != VERSION:
            raise ContainerError(f"has version {body['version']!r}, which this version does not read")
        if body["byteorder"] != sys.byteorder:
            raise ContainerError(f"was written on a {body['byteorder']}-endian machine, this one is {sys.byteorder}")
        extents = tuple(
            Extent(tuple(map(int, numbers)), str(dtype), tuple(map(int, shape)), int(offset), int(nbytes), str(sha256))
            for numbers, dtype, shape, offset, nbytes, sha256 in body["tensors"]
        )
        state = body["state"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ContainerError):
            raise
        raise ContainerError(f"its index is no index ({error})") from error
    _check_places(extents, at)
    return Index(state, extents, digest.hex())


def verify(stream: BinaryIO) -> Index:
    """Check every byte of a seekable stream. Raises ContainerError naming the damaged tensor."""
    index = read_index(stream)
    names = tensor_names(index.state)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    position = len(MAGIC)
    stream.seek(position)
    for extent in index.extents:
        if stream.read(extent.offset - position).strip(b"\0"):
            raise ContainerError(f"the bytes before {_name(extent, names)} are damaged")
        digest = hashlib.sha256()
        for chunk in _chunks(stream, extent, buffer):
            digest.update(chunk)
        if digest.hexdigest() != extent.sha256:
            raise ContainerError(f"{_name(extent, names)} is damaged (SHA-256 differs)")
        position = extent.offset + extent.nbytes
    return index


def read_into(stream: BinaryIO, extent: Extent, target: memoryview) -> None:
    """Read a tensor's bytes and verify them. Raises ContainerError if they are damaged."""
    stream.seek(extent.offset)
    digest = hashlib.sha256()
    position = 0
    while position < extent.nbytes:
        count = stream.readinto(target[position : position + CHUNK_BYTES])  # type: ignore[attr-defined]  # not in stubs
        if not count:
            raise ContainerError(f"ends in the middle of {_name(extent, {})}")
        digest.update(target[position : position + count])
        position += count
    if digest.hexdigest() != extent.sha256:
        raise ContainerError(f"{_name(extent, {})} is damaged (SHA-256 differs)")


def tensor_names(state: Any) -> dict[int, str]:
    """Return the path of each tensor in a described state (see state_tree.py), by number; used in messages."""
    names: dict[int, str] = {}
    todo: list[tuple[str, Any]] = [("", state)]
    while todo:
        path, item = todo.pop()
        if not isinstance(item, dict):
            continue
        for kind, inner in item.items():
            if kind == "tensor":
                names[inner] = path
            elif kind == "dict":
                todo += [(f"{path}/{key}" if path else str(key), value) for key, value in inner]
            elif kind in ("list", "tuple"):
                todo += [(f"{path}/{i}", value) for i, value in enumerate(inner)]
    return names


def _check_places(extents: Sequence[Extent], end: int) -> None:
    """Refuse an index whose tensors overlap, leave bytes uncovered, or need more memory than the file has bytes."""
    position = len(MAGIC)
    for extent in extents:
        if extent.nbytes < 0 or any(n < 0 for n in extent.shape) or not 0 <= extent.offset - position < ALIGNMENT:
            raise ContainerError("its index is no index (tensors overlap, or leave gaps)")
        count = math.prod(extent.shape)
        if (extent.nbytes % count if count else extent.nbytes) != 0:
            raise ContainerError("its index is no index (a shape does not fit its bytes)")
        position = extent.offset + extent.nbytes
    if position != end:
        raise ContainerError("its index is no index (the tensors do not end where it begins)")


def _chunks(stream: BinaryIO, extent: Extent, buffer: memoryview) -> Iterator[memoryview]:
    left = extent.nbytes
    while left:
        count = stream.readinto(buffer[: min(left, len(buffer))])  # type: ignore[attr-defined]  # every file has it
        if not count:
            raise ContainerError("ends in the middle of a tensor")
        yield buffer[:count]
        left -= count


def _name(extent: Extent, names: dict[int, str]) -> str:
    number = extent.numbers[0] if extent.numbers else -1
    return f"tensor {names[number]}" if number in names else f"tensor {number}"

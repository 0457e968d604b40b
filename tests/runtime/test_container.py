"""The file format of checkpoints: what is written comes back, and no damage goes unnoticed."""

from __future__ import annotations

import hashlib
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticflow_airflow.runtime.stores import file_format
from elasticflow_airflow.runtime.stores.file_format import Blob, ContainerError, Index

STATE = {"dict": [["weight", {"tensor": 0}], ["inner", {"list": [{"tensor": 1}, {"tensor": 2}]}], ["lr", 0.1]]}


def blobs(*contents: bytes) -> list[Blob]:
    return [Blob((i,), "uint8", (len(content),), memoryview(content)) for i, content in enumerate(contents)]


def written(state: object = STATE, contents: tuple[bytes, ...] = (b"a" * 100, b"", bytes(range(64)))) -> bytes:
    stream = io.BytesIO()
    result = file_format.write(stream, state, blobs(*contents))
    assert result.size_bytes == len(stream.getvalue())
    return stream.getvalue()


def verified(raw: bytes) -> Index:
    return file_format.verify(io.BytesIO(raw))


def contents_of(raw: bytes) -> list[bytes]:
    read = []
    for extent in file_format.read_index(io.BytesIO(raw)).extents:
        target = bytearray(extent.nbytes)
        file_format.read_into(io.BytesIO(raw), extent, memoryview(target))
        read.append(bytes(target))
    return read


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_what_is_written_comes_back(contents):
    raw = written({"contents": len(contents)}, tuple(contents))
    index = verified(raw)
    assert index.state == {"contents": len(contents)}
    assert contents_of(raw) == contents
    assert all(extent.offset % file_format.ALIGNMENT == 0 for extent in index.extents)


def test_more_than_a_chunk():
    big = bytes(file_format.CHUNK_BYTES) + b"end"
    assert contents_of(written(None, (big, b"x"))) == [big, b"x"]


def test_the_same_state_gives_the_same_bytes():
    assert written() == written()


def boundaries(raw: bytes) -> dict[str, int]:
    """A place of every kind at which a file may end."""
    extents = file_format.read_index(io.BytesIO(raw)).extents
    index_at = extents[-1].offset + extents[-1].nbytes
    return {
        "nothing": 0,
        "in the magic": 7,
        "after the magic": len(file_format.MAGIC),
        "in the padding": extents[0].offset - 1,
        "before a tensor": extents[0].offset,
        "in a tensor": extents[0].offset + 50,
        "after a tensor": extents[0].offset + extents[0].nbytes,
        "in the last tensor": index_at - 1,
        "before the index": index_at,
        "in the index": index_at + 20,
        "before the trailer": len(raw) - 56,
        "in the trailer": len(raw) - 30,
        "before the end magic": len(raw) - 8,
        "before the last byte": len(raw) - 1,
    }


@pytest.mark.parametrize("where", boundaries(written()))
def test_a_torn_file_is_found(where):
    raw = written()
    torn = raw[: boundaries(raw)[where]]
    with pytest.raises(ContainerError):
        verified(torn)
    # As a file that was preallocated, and whose rest never came.
    with pytest.raises(ContainerError):
        verified(torn + bytes(len(raw) - len(torn)))


def test_every_truncation_and_every_longer_file_is_found():
    raw = written()
    for length in range(len(raw)):
        with pytest.raises(ContainerError):
            verified(raw[:length])
    for more in (b"\0", b"x" * 56, raw):
        with pytest.raises(ContainerError):
            verified(raw + more)


def test_every_bit_flip_is_found():
    raw = bytearray(written())
    for position in range(len(raw)):
        for bit in range(8):
            raw[position] ^= 1 << bit
            with pytest.raises(ContainerError):
                verified(bytes(raw))
            raw[position] ^= 1 << bit
    verified(bytes(raw))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_damage_goes_unnoticed(data):
    """Runs of bytes overwritten, moved, dropped or doubled, anywhere."""
    raw = written()
    start = data.draw(st.integers(0, len(raw) - 1))
    stop = data.draw(st.integers(start + 1, len(raw)))
    at = data.draw(st.integers(0, len(raw)))
    damaged = data.draw(
        st.sampled_from(
            [
                raw[:start] + bytes(stop - start) + raw[stop:],
                raw[:start] + raw[stop:],
                raw[:at] + raw[start:stop] + raw[at:],
                raw[:at] + raw[start:stop] + raw[at + stop - start :],
            ]
        )
    )
    if damaged == raw:
        return
    with pytest.raises(ContainerError):
        verified(damaged)


def test_damage_in_a_tensor_names_it():
    raw = bytearray(written())
    raw[file_format.read_index(io.BytesIO(raw)).extents[2].offset + 3] ^= 1
    with pytest.raises(ContainerError, match=r"tensor inner/1 is damaged \(SHA-256 differs\)"):
        verified(bytes(raw))


def test_an_end_of_file_that_comes_while_reading_is_noticed():
    raw = written()
    extent = file_format.read_index(io.BytesIO(raw)).extents[0]
    with pytest.raises(ContainerError, match="ends in the middle of tensor 0"):
        file_format.read_into(io.BytesIO(raw[:50]), extent, memoryview(bytearray(extent.nbytes)))


def forged(raw: bytes, **changes: object) -> bytes:
    """Give a file another index with a right digest: not damage, but somebody's work."""
    extents = file_format.read_index(io.BytesIO(raw)).extents
    at = extents[-1].offset + extents[-1].nbytes
    body = json.loads(raw[at:-56])
    index = json.dumps(body | changes).encode()
    trailer = file_format._TRAILER.pack(at, len(index), hashlib.sha256(index).digest(), file_format.END_MAGIC)
    return raw[:at] + index + trailer


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"byteorder": "middle"},
        {"tensors": []},
        {"tensors": 3},
        {"tensors": [[[0], "uint8", [1 << 60], 64, 1 << 60, ""]]},
        {"tensors": [[[0], "uint8", [-1], 64, -1, ""]]},
        {"tensors": [[[0], "uint8", [3], 64, 100, ""]]},
        {"tensors": [[[0], "uint8", [100], 64, 100, ""], [[1], "uint8", [100], 64, 100, ""]]},
    ],
)
def test_an_index_that_lies_is_refused(changes):
    with pytest.raises(ContainerError):
        file_format.read_index(io.BytesIO(forged(written(), **changes)))


def test_deep_nesting_is_an_error_not_a_crash():
    raw = written()
    extents = file_format.read_index(io.BytesIO(raw)).extents
    at = extents[-1].offset + extents[-1].nbytes
    index = b"[" * 200_000
    deep = (
        raw[:at]
        + index
        + file_format._TRAILER.pack(at, len(index), hashlib.sha256(index).digest(), file_format.END_MAGIC)
    )
    with pytest.raises(ContainerError, match="is no index"):
        file_format.read_index(io.BytesIO(deep))

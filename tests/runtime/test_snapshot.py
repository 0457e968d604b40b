"""Copies of a state in memory that a writer shares: every byte, whatever the sizes, and however many threads copy."""

from __future__ import annotations

import threading

import pytest
import torch

from elasticflow_airflow.runtime.checkpoints import state_copy
from elasticflow_airflow.runtime.checkpoints.state_copy import Content, SharedBuffer, content_of, size_of


def state(megabytes: int) -> dict[str, torch.Tensor]:
    """Tensors of sizes that nothing divides; one is most of it, some are not laid out in order, one is empty."""
    torch.manual_seed(megabytes)
    return {
        "large": torch.randn((megabytes << 18) + 1013),
        "turned": torch.randn(37, 1021).t(),
        "bytes": torch.randint(0, 255, (3 * 1024 * 1024 + 7,), dtype=torch.uint8),
        "half": torch.randn(5, 3).bfloat16(),
        "none": torch.empty(0),
    }


def copied(buffer: SharedBuffer, content: Content) -> list[bytes]:
    """What is in the buffer of each tensor."""
    (offsets,) = buffer.take([content])
    return [
        bytes(buffer._map[offset : offset + piece.nbytes])
        for offset, piece in zip(offsets, content.pieces, strict=True)
    ]


def expected(content: Content) -> list[bytes]:
    return [piece.tensor.contiguous().view(torch.uint8).numpy().tobytes() for piece in content.pieces]


@pytest.mark.parametrize(("megabytes", "threads"), [(1, 1), (40, 2), (100, 4)])
def test_every_byte_is_copied(megabytes, threads, monkeypatch):
    monkeypatch.setattr(state_copy.os, "sched_getaffinity", lambda _: range(64))
    begun: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (begun.append(thread.name), start(thread)))
    first = content_of("model", state(megabytes))
    buffer = SharedBuffer(1, size_of([first]))
    for content in (first, content_of("model", state(megabytes))):
        assert copied(buffer, content) == expected(content)
        assert all(not thread.name.startswith("elasticflow-copy") for thread in threading.enumerate())
    assert begun == ["elasticflow-copy"] * 2 * (threads - 1)
    buffer.close()


def test_a_single_core_copies_with_one_thread(monkeypatch):
    monkeypatch.setattr(state_copy.os, "sched_getaffinity", lambda _: {3})
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread"))
    content = content_of("model", state(40))
    buffer = SharedBuffer(1, size_of([content]))
    assert copied(buffer, content) == expected(content)
    buffer.close()

"""Memory that a GPU copies into: locked where CUDA does that, and only slower where it does not. CUDA is played."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from elasticflow_airflow.runtime import bootstrap
from elasticflow_airflow.runtime.checkpoints.state_copy import SharedBuffer


class Cuda:
    """What it was asked, on which device, and with which error it answers."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.on = error, "no device"
        self.asked: list[tuple[str, str]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.asked.append(("register", self.on))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.asked.append(("unregister", self.on))
        return self.error


def played(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> None:
    @contextlib.contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        cuda.on = str(wanted)
        yield
        cuda.on = "no device"

    def zeros(*_: object, device: str) -> None:
        raise RuntimeError(f"the error before, on {device}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch, "zeros", zeros)


def test_memory_is_locked_by_the_device_that_copies_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    played(monkeypatch, cuda)
    buffer = SharedBuffer(1, 1 << 16)
    buffer.touch(pin_for=torch.device("cuda", 1))
    buffer.touch(pin_for=torch.device("cuda", 1))
    assert buffer.is_pinned
    buffer.close()
    assert cuda.asked == [("register", "cuda:1"), ("unregister", "cuda:1")]


def test_memory_that_cannot_be_locked_serves_as_well(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    cuda = Cuda(error=2)
    played(monkeypatch, cuda)
    buffer = SharedBuffer(1, 1 << 16)
    buffer.touch(pin_for=torch.device("cuda", 0))
    assert not buffer.is_pinned
    assert "CUDA error 2" in capsys.readouterr().err
    buffer.close()
    assert cuda.asked == [("register", "cuda:0")]


def test_without_a_gpu_cuda_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    played(monkeypatch, cuda)
    buffer = SharedBuffer(1, 1 << 16)
    buffer.touch(pin_for=None)
    buffer.close()
    assert cuda.asked == []


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_libraries_that_find_no_memory_on_the_device_say_so_in_their_own_words(text: str) -> None:
    assert bootstrap.is_out_of_memory(RuntimeError(text))

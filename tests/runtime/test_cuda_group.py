"""The group of workers with GPUs, as far as it goes without one: who carries the bytes, and through the host.

What needs a device is in tests/gpu.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo

from elasticflow_airflow.runtime.gang import cuda_group
from elasticflow_airflow.runtime.gang.cuda_group import (
    BACKEND_ENV,
    CudaGroup,
    Seat,
    Staged,
    choose_backend,
    refusal,
    wait_on_host,
)
from elasticflow_airflow.runtime.gang.process_group import sum_in_tree

LIMIT = datetime.timedelta(seconds=30)


@pytest.fixture(autouse=True)
def _on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def in_each_worker(size: int, work: Callable[[int, Any], Any]) -> list[Any]:
    """Call ``work(rank, store)`` in a thread for each worker; their answers by rank."""
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        return [future.result(60) for future in [pool.submit(work, rank, store) for rank in range(size)]]


def test_workers_with_a_gpu_each_use_nccl() -> None:
    assert choose_backend([Seat("m/0"), Seat("m/1"), Seat("n/0")]) == ("nccl", "")
    assert choose_backend([Seat("m/0")]) == ("nccl", "")


def test_workers_that_share_a_gpu_do_not() -> None:
    backend, why = choose_backend([Seat("m/0"), Seat("m/1"), Seat("m/0")])
    assert backend == "gloo"
    assert why == "workers 0 and 2 share a GPU, which NCCL refuses"


def test_one_worker_that_cannot_is_enough() -> None:
    backend, why = choose_backend([Seat("m/0"), Seat("m/1", "this torch was built without NCCL")])
    assert (backend, why) == ("gloo", "worker 1: this torch was built without NCCL")


@pytest.mark.parametrize(
    ("environ", "model", "there", "reason"),
    [
        ({}, "NVIDIA H200", True, None),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, "NVIDIA H200", True, None),
        ({BACKEND_ENV: "nccl"}, "NVIDIA H200", True, None),
        ({}, "NVIDIA H200", False, "without NCCL"),
        ({BACKEND_ENV: "gloo"}, "NVIDIA H200", True, "says gloo"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, "NVIDIA A100", True, "MIG"),
        ({}, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", True, "MIG"),
    ],
)
def test_why_a_device_cannot_use_nccl(environ: dict[str, str], model: str, there: bool, reason: str | None) -> None:
    found = refusal(environ, model, there)
    assert found is None if reason is None else reason in (found or "")


def test_a_backend_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="'mpi'"):
        refusal({BACKEND_ENV: "mpi"}, "NVIDIA H200", True)


@pytest.mark.parametrize("size", [2, 4])
def test_sums_through_the_host_are_those_of_gloo(size: int) -> None:
    leaves = [torch.randn(1001, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]

    def work(rank: int, store: Any) -> tuple[torch.Tensor, torch.Tensor]:
        gloo = ProcessGroupGloo(store, rank, size, LIMIT)
        sums = []
        for group in (gloo, Staged(gloo)):
            flat = leaves[rank].clone()
            sum_in_tree(flat, torch.empty(501), group, rank, size)
            sums.append(flat)
        return sums[0], sums[1]

    found = in_each_worker(size, work)
    assert all(torch.equal(direct, staged) for direct, staged in found)
    assert all(torch.equal(found[0][1], staged) for _, staged in found)


def test_what_is_begun_together_is_waited_for_together() -> None:
    def work(rank: int, store: Any) -> torch.Tensor:
        staged = Staged(ProcessGroupGloo(store, rank, 2, LIMIT))
        into = torch.zeros(2, 3)
        staged.start_together()
        staged.send([torch.full((2, 3), float(rank + 1))], 1 - rank, 0)
        staged.recv([into], 1 - rank, 0)
        staged.end_together().wait()
        staged.start_together()
        staged.end_together().wait()  # nothing
        return into

    zero, one = in_each_worker(2, work)
    assert torch.equal(zero, torch.full((2, 3), 2.0))
    assert torch.equal(one, torch.full((2, 3), 1.0))


@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor([1.5, 2.5]).bfloat16(), torch.arange(4).view(2, 2)])
def test_every_dtype_goes_from_one_to_all(value: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 1

    def work(rank: int, store: Any) -> torch.Tensor:
        tensor = value.clone() if rank == 1 else torch.zeros_like(value)
        Staged(ProcessGroupGloo(store, rank, 2, LIMIT)).broadcast([tensor], options).wait()
        return tensor

    assert all(torch.equal(found, value) for found in in_each_worker(2, work))


def test_all_workers_choose_alike_and_one_says_why(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setattr(cuda_group, "seat_of", lambda device, environ: Seat("machine/0"))

    def work(rank: int, store: Any) -> tuple[str, torch.Tensor]:
        group = CudaGroup(PrefixStore("g", store), rank, 2, LIMIT, torch.device("cpu"))
        rows = [torch.empty(1), torch.empty(1)]
        group.allgather([rows], [torch.tensor([float(rank)])]).wait()
        group._start_coalescing()
        assert group._end_coalescing().wait() is None
        group.abort_device()
        group.close_device()
        return group.backend, torch.stack(rows)

    for backend, rows in in_each_worker(2, work):
        assert backend == "gloo"
        assert rows.tolist() == [[0.0], [1.0]]
    assert capfd.readouterr().err.count("workers 0 and 1 share a GPU") == 1


def test_an_operation_that_happens_is_waited_for() -> None:
    answers = iter([False, False, True])
    assert wait_on_host(lambda: next(answers), lambda: False, threading.Event())


def test_who_waits_for_the_dead_is_freed() -> None:
    aborted, asked = threading.Event(), threading.Event()

    def happened() -> bool:
        asked.set()
        return False

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_on_host, happened, lambda: False, aborted)
        assert asked.wait(30)
        aborted.set()
        assert waiting.result(30) is False


def test_an_aborted_operation_does_not_count_though_its_kernel_ended() -> None:
    aborted = threading.Event()
    aborted.set()
    assert not wait_on_host(lambda: True, lambda: True, aborted)


def test_an_operation_that_ended_with_an_error_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_group, "_LOOK_FOR_ERRORS_S", 0.0)
    monkeypatch.setattr(cuda_group, "_SETTLING_LIMIT_S", 0.01)
    assert not wait_on_host(lambda: False, lambda: True, threading.Event())

"""NCCL as far as one GPU shows it: a world of one, made and ended beside other work in a thread of its own.

Between workers it needs a GPU each: the last test is skipped where there is only one.
"""

from __future__ import annotations

import datetime
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from elasticflow_airflow.runtime.gang.cuda_group import CudaGroup, Seat, choose_backend, seat_of

pytestmark = pytest.mark.gpu

LIMIT = datetime.timedelta(seconds=60)


@pytest.fixture(autouse=True)
def _on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")


def world_of_one() -> CudaGroup:
    if not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    if seat_of(torch.device("cuda", 0), os.environ).refuses:
        pytest.skip(str(seat_of(torch.device("cuda", 0), os.environ).refuses))
    with ThreadPoolExecutor(1) as pool:  # in a thread whose current device nobody has chosen
        return pool.submit(CudaGroup, dist.HashStore(), 0, 1, LIMIT, torch.device("cuda", 0)).result(60)


def test_a_device_is_told_from_others_by_its_place() -> None:
    seat = seat_of(torch.device("cuda", 0), {})
    assert seat == seat_of(torch.device("cuda", 0), {})
    assert choose_backend([seat, seat])[0] == "gloo"
    assert choose_backend([Seat(seat.gpu), Seat("another")])[0] == "nccl"


def test_a_world_of_one_sums_on_a_stream_of_its_own() -> None:
    group = world_of_one()
    assert group.backend == "nccl"
    flat = torch.arange(1024, dtype=torch.float32, device="cuda")
    ready = torch.cuda.current_stream().record_event()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        group.allreduce([flat]).wait()
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(flat.cpu(), torch.arange(1024, dtype=torch.float32))
    group._start_coalescing(flat.device)
    group._end_coalescing(flat.device).wait()  # nothing was begun
    group.close_device()
    group.close_device()


def test_many_communicators_are_made_and_ended_beside_work() -> None:
    stop = threading.Event()
    done = 0

    def work() -> None:
        nonlocal done
        matrix = torch.randn(256, 256, device="cuda")
        while not stop.is_set():
            (matrix @ matrix).sum().item()
            done += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            group = world_of_one()
            flat = torch.ones(8, device="cuda")
            group.allreduce([flat]).wait()
            group.close_device()
            assert flat.tolist() == [1.0] * 8
    finally:
        stop.set()
        thread.join()
    assert done


def test_after_an_abort_operations_fail_and_the_device_goes_on() -> None:
    group = world_of_one()
    group.abort_device()
    group.close_device()  # it is over when this returns
    with pytest.raises(RuntimeError):
        group.allreduce([torch.ones(8, device="cuda")]).wait()
    assert torch.ones(8, device="cuda").sum().item() == 8.0
    again = world_of_one()
    again.allreduce([torch.ones(8, device="cuda")]).wait()
    again.close_device()


def test_two_workers_with_a_gpu_each_train_the_same_bits_as_one(gpu_gang, weights_of) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {torch.cuda.device_count()}")
    alone = gpu_gang()
    alone.plan("w0")
    assert alone.finish() == {"w0": 0}, alone.story()
    both = gpu_gang()
    both.env_of = {f"w{rank}": {"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(2)}
    both.plan("w0", "w1")
    assert set(both.finish().values()) == {0}, both.story()
    assert not any("by gloo" in line for line in both.output())
    assert weights_of(both) == weights_of(alone)

"""Sums of gradients of several workers: they look like those of one. The workers are threads of the test."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo
from torch.utils.checkpoint import checkpoint

from elasticflow_airflow.runtime.gang.process_group import GroupBroken, WorkerGroup, sum_in_tree
from elasticflow_airflow.runtime.stepping.reduction import GradientReducer

SHARES = torch.randn(2, 4, 3, 9, 9, generator=torch.Generator().manual_seed(1))


def gradients(group: WorkerGroup, shares: Tensor) -> list[Tensor]:
    """Of a convolution whose weights are laid out with channels last, summed over all shares."""
    with torch.random.fork_rng():
        model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    reducer = GradientReducer(list(model.parameters()), tree=True)
    reducer.begin(group, len(shares))
    for number, share in enumerate(shares):
        if number == len(shares) - 1:
            reducer.last_backward()
        model(share.to(memory_format=torch.channels_last)).square().sum().backward()
        reducer.leaf_done()
    present = reducer.present
    reducer.finish()
    reducer.install(present)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_of_two_workers_are_laid_out_as_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    alone = gradients(WorkerGroup(), SHARES)
    store = dist.HashStore()

    def work(rank: int) -> list[Tensor]:
        group = WorkerGroup(rank, 2, ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=30)), 1)
        try:
            return gradients(group, SHARES[rank : rank + 1])
        finally:
            group.close()
            assert group.join(30)

    with ThreadPoolExecutor(2) as pool:
        both = [future.result(60) for future in [pool.submit(work, rank) for rank in range(2)]]
    assert alone[0].stride() != alone[0].contiguous().stride()
    for found in both:
        assert [g.stride() for g in found] == [g.stride() for g in alone]
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
        norms = [float(torch.nn.utils.get_total_norm(one)) for one in (found, alone)]
        assert norms[0] == norms[1]


class Device:
    """Plays a process group with a device behind it."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def abort_device(self) -> None:
        self.ended.append("aborted")

    def close_device(self) -> None:
        self.ended.append("closed")


def test_operations_of_a_device_are_aborted_when_a_member_is_lost() -> None:
    device = Device()
    group = WorkerGroup(0, 2, device, 1)
    group.give_up("worker w1 is lost")
    group.close()
    assert group.join(30)
    assert device.ended == ["aborted", "closed"]


def raises(error: Exception) -> Any:
    def operation(_: Any) -> None:
        raise error

    return operation


def test_an_error_of_the_own_device_is_not_taken_for_the_loss_of_another_worker() -> None:
    group = WorkerGroup(0, 2, Device(), 1)
    with pytest.raises(torch.OutOfMemoryError):
        group.wait(group.submit(raises(torch.OutOfMemoryError("CUDA out of memory"))))
    with pytest.raises(GroupBroken):
        group.wait(group.submit(raises(RuntimeError("connection closed by peer"))))
    group.close()
    assert group.join(30)


@pytest.mark.parametrize("size", [0, 3, 6])
def test_a_number_of_workers_that_no_tree_serves_is_refused_at_once(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} workers cannot sum in a tree"):
        sum_in_tree(torch.ones(4), torch.empty(2), None, 0, size)


class Repeated(nn.Module):
    """A layer that is used twice, as ALBERT's are, and forgets what is between."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self._use_reentrant = nn.Linear(3, 3), use_reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(2):
            inputs = checkpoint(self.layer, inputs, use_reentrant=self._use_reentrant)
        return inputs.sum()


def two_steps(model: Repeated, leaves: int, *, alone: bool) -> None:
    """Of one process, which has so many logical workers."""
    reducer = GradientReducer(list(model.parameters()), tree=True, alone=alone)
    for _step in range(2):
        reducer.begin(WorkerGroup(), leaves)
        for leaf in range(leaves):
            loss = model(torch.ones(2, 3, requires_grad=True))
            if leaf == leaves - 1:
                reducer.last_backward()
            loss.backward()
            reducer.leaf_done()
        present = reducer.present
        reducer.finish()
        reducer.install(present)
        assert model.layer.weight.grad is not None


def test_what_several_workers_could_not_sum_shows_on_one_that_may_become_several() -> None:
    for leaves in (1, 2):
        with pytest.raises(RuntimeError, match=r"gradients twice .*Use checkpoint\(\.\.\., use_reentrant=False\)"):
            two_steps(Repeated(use_reentrant=True), leaves, alone=False)
        two_steps(Repeated(use_reentrant=False), leaves, alone=False)


def test_what_is_never_summed_may_come_twice() -> None:
    for leaves in (1, 2):
        two_steps(Repeated(use_reentrant=True), leaves, alone=True)

"""What workers tell each other, through a real group of gloo; the workers are threads of the test."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from elasticflow_airflow.runtime.gang.process_group import WorkerGroup


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run one function as each of so many workers, and return what each of them returns."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(size: int, work: Callable[[WorkerGroup], Any]) -> list[Any]:
        store = dist.HashStore()

        def one(rank: int) -> Any:
            group = WorkerGroup(rank, size, ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=30)), 1)
            try:
                return work(group)
            finally:
                group.close()
                assert group.join(30)

        with ThreadPoolExecutor(size) as pool:
            return [future.result(60) for future in [pool.submit(one, rank) for rank in range(size)]]

    return run


@pytest.mark.parametrize("sizes", [(0, 1, 2), (40_000, 3, 16_384), (1 << 20, 1 << 20, 1 << 20), (16_382, 16_383, 1)])
def test_values_of_any_size_are_exchanged(together, sizes) -> None:
    values = [{"rank": rank, "text": "ä" * size} for rank, size in enumerate(sizes)]
    assert together(3, lambda group: group.exchange_values(values[group.rank])) == [values] * 3


def test_values_are_the_same_alone() -> None:
    value = [1.5, None, {"a": "b" * 100_000}]
    assert WorkerGroup().exchange_values(value) == [value]


def test_one_exchange_after_the_other(together) -> None:
    """A long one leaves nothing behind that the next would take for its own."""

    def work(group: WorkerGroup) -> list[Any]:
        return [group.exchange_values([group.rank] * length) for length in (1, 30_000, 2)]

    expected = [[[rank] * length for rank in range(2)] for length in (1, 30_000, 2)]
    assert together(2, work) == [expected] * 2

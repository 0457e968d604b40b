"""What a ticket stands for is the same wherever it is fetched, and nothing is lost when its owner changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import Dataset, default_collate

from elasticflow_airflow.runtime.data import BatchPlan, ElasticLoader
from elasticflow_airflow.runtime.fetching import DirectFetcher, WorkerFetcher, make_fetcher

LOGICAL = 4


class Noisy(Dataset[tuple[int, torch.Tensor, float]]):
    """Samples that tell their index, with random augmentation from two generators."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float]:
        if index == 10_000:
            raise ValueError("row 10000 is damaged")
        return index, torch.rand(2), random.random()


class Worker:
    """One process of a gang, as the loader sees it."""

    def __init__(self, plan: BatchPlan, fetcher) -> None:
        self.step, self.rank, self.size = 0, 0, 1
        self.loader = ElasticLoader(
            plan,
            fetcher,
            logical_workers=lambda: LOGICAL,
            position=lambda: divmod(self.step, plan.steps_per_epoch),
            owned=lambda: range(self.rank * LOGICAL // self.size, (self.rank + 1) * LOGICAL // self.size),
        )


@pytest.fixture
def fetchers() -> Iterator[list]:
    made: list = []
    yield made
    for fetcher in made:
        fetcher.close()


def contents(batch) -> list:
    return [
        (share.ticket.logical, *(field.tolist() for field in share.content)) for share in batch.shares if share.content
    ]


def test_a_life_of_rescales_uses_each_sample_once_with_the_same_augmentation(fetchers):
    plan = BatchPlan(samples=46, global_batch_size=8, seed=5, shuffle=True)
    dataset = Noisy(plan.samples)
    lone = Worker(plan, DirectFetcher(dataset, default_collate))
    expected = {}
    for lone.step in range(2 * plan.steps_per_epoch):
        expected[lone.step] = contents(lone.loader.batch(*divmod(lone.step, plan.steps_per_epoch)))
    gang = []
    for _ in range(4):
        fetchers.append(WorkerFetcher(dataset, default_collate, {"num_workers": 1, "prefetch_factor": 3}))
        gang.append(Worker(plan, fetchers[-1]))
    sizes = [1] * 2 + [2] * 3 + [4] * 3 + [1] * 2 + [2] * 2
    used: Counter[tuple[int, int]] = Counter()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for step, size in enumerate(sizes):
        found = []
        epoch, in_epoch = divmod(step, plan.steps_per_epoch)
        for rank, worker in enumerate(gang[:size]):
            worker.step, worker.rank, worker.size = step, rank, size
            batch = worker.loader.batch(epoch, in_epoch)
            found += contents(batch)
            used.update((epoch, index) for index in batch.indices)
        assert found == expected[step]
    assert torch.equal(torch.get_rng_state(), before)
    assert used == Counter({(epoch, index): 1 for epoch in range(2) for index in range(plan.samples)})


def test_passes_of_the_loader_prefetch_over_epochs(fetchers):
    plan = BatchPlan(samples=23, global_batch_size=5, seed=1, shuffle=True)
    fetchers.append(make_fetcher(Noisy(plan.samples), default_collate, {"num_workers": 2}))
    worker = Worker(plan, fetchers[-1])
    processes = set()
    for epoch in range(3):
        seen = []
        for batch in worker.loader:
            seen += batch.indices
            worker.step += 1
            processes |= {process.pid for process in fetchers[-1]._coming._workers}
        assert sorted(seen) == list(range(23))
        assert worker.step == (epoch + 1) * plan.steps_per_epoch
    assert len(processes) == 2  # they persist


def test_a_share_out_of_turn_is_fetched_at_once(fetchers):
    """In the middle of a step that is shared anew, a survivor asks for what was another's."""
    plan = BatchPlan(samples=32, global_batch_size=8, seed=1, shuffle=True)
    fetchers.append(WorkerFetcher(Noisy(32), default_collate, {"num_workers": 1}))
    worker = Worker(plan, fetchers[-1])
    worker.size = 2
    first = worker.loader.batch(0, 0)
    worker.size = 1
    again = worker.loader.batch(0, 0)
    assert contents(again)[:2] == contents(first)
    assert len(again.shares) == LOGICAL


def test_an_error_in_a_dataset_comes_through(fetchers):
    plan = BatchPlan(samples=10_001, global_batch_size=10_001, seed=0, shuffle=False)
    for options in ({}, {"num_workers": 1}):
        fetchers.append(make_fetcher(Noisy(10_001), default_collate, options))
        with pytest.raises(ValueError, match="row 10000 is damaged"):
            Worker(plan, fetchers[-1]).loader.batch(0, 0)

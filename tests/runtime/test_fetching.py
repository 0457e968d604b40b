"""What a ticket stands for is the same wherever it is fetched, and nothing is lost when its owner changes."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from elasticflow_airflow.runtime.samples.fetching import DirectFetcher, WorkerFetcher, make_fetcher
from elasticflow_airflow.runtime.samples.sample_order import BatchPlan, ElasticLoader

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


class Counted(Noisy):
    """Writes down, over processes, how often each sample was loaded."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.loads = torch.zeros(samples, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float]:
        self.loads[index] += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (1, 4), (4, 1), (2, 2)])
def test_what_is_still_ours_after_a_change_is_not_loaded_again(fetchers, before, after):
    plan = BatchPlan(samples=64, global_batch_size=8, seed=3, shuffle=True)
    dataset = Counted(plan.samples)
    lone = Worker(plan, DirectFetcher(Noisy(plan.samples), default_collate))
    fetchers.append(WorkerFetcher(dataset, default_collate, {"num_workers": 1, "prefetch_factor": 6}))
    worker = Worker(plan, fetchers[-1])
    for step, size in enumerate([before] * 3 + [after] * 5):
        lone.size = worker.size = size
        if step == 3:
            worker.loader.jump()  # as who has just joined
        assert contents(worker.loader.batch(0, step)) == contents(lone.loader.batch(0, step))
    assert int(dataset.loads.max()) == 1


class Located(Noisy):
    """Counts what is loaded in the training's own process."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.here = 0

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float]:
        self.here += get_worker_info() is None
        return super().__getitem__(index)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("again", [False, True])
def test_who_owns_more_after_a_change_goes_on_fetching_ahead(fetchers, rank, again):
    """Also where a step is made anew: what it had of it already is not in the queues any more."""
    plan = BatchPlan(samples=240, global_batch_size=8, seed=3, shuffle=True)
    dataset = Located(plan.samples)
    lone = Worker(plan, DirectFetcher(Noisy(plan.samples), default_collate))
    fetchers.append(WorkerFetcher(dataset, default_collate, {"num_workers": 1, "prefetch_factor": 8}))
    worker = Worker(plan, fetchers[-1])
    steps = [*range(11), *range(10 if again else 11, plan.steps_per_epoch)]
    for number, step in enumerate(steps):
        lone.rank, lone.size = worker.rank, worker.size = (rank, 2) if number < 11 else (0, 1)
        assert contents(worker.loader.batch(0, step)) == contents(lone.loader.batch(0, step))
    assert dataset.here == 0


def test_many_changes_hold_no_more_than_a_few_batches(fetchers):
    plan = BatchPlan(samples=400, global_batch_size=8, seed=3, shuffle=True)
    lone = Worker(plan, DirectFetcher(Noisy(plan.samples), default_collate))
    fetchers.append(WorkerFetcher(Noisy(plan.samples), default_collate, {"num_workers": 2, "prefetch_factor": 4}))
    worker = Worker(plan, fetchers[-1])
    held = 0
    for step in range(plan.steps_per_epoch):
        lone.size = worker.size = [1, 2, 4, 2][step % 4]
        assert contents(worker.loader.batch(0, step)) == contents(lone.loader.batch(0, step))
        held = max(held, len(fetchers[-1]._held))
    assert 0 < held <= 8


def test_a_change_at_the_end_of_an_epoch_leaves_the_next_one_all_its_prefetching(fetchers):
    plan = BatchPlan(samples=32, global_batch_size=8, seed=1, shuffle=True)
    fetchers.append(WorkerFetcher(Noisy(32), default_collate, {"num_workers": 1, "prefetch_factor": 6}))
    worker = Worker(plan, fetchers[-1])
    ahead = []
    for number in range(3 * plan.steps_per_epoch):
        worker.size = 2 if number == plan.steps_per_epoch - 1 else 1  # of the last batch some is not asked for
        epoch, step = divmod(number, plan.steps_per_epoch)
        worker.loader.batch(epoch, step)
        ahead += [len(fetchers[-1]._queue.sent)] if step == 0 else []
    assert ahead == [6, 6, 6]


def test_another_epoch_than_the_expected_one(fetchers):
    """Who joins has rehearsed elsewhere."""
    plan = BatchPlan(samples=32, global_batch_size=8, seed=1, shuffle=True)
    lone = Worker(plan, DirectFetcher(Noisy(32), default_collate))
    fetchers.append(WorkerFetcher(Noisy(32), default_collate, {"num_workers": 2}))
    worker = Worker(plan, fetchers[-1])
    for epoch, step in [(5, 1), (5, 2), (2, 3), (3, 0), (3, 1), (9, 3), (3, 2), (3, 2), (3, 3), (4, 0)]:
        assert contents(worker.loader.batch(epoch, step)) == contents(lone.loader.batch(epoch, step))


def test_damage_in_a_share_that_is_no_longer_ours_is_its_owners(fetchers):
    plan = BatchPlan(samples=16, global_batch_size=8, seed=0, shuffle=False)

    class Damaged(Noisy):
        def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float]:
            if index == 14:
                raise KeyError("row 14 is damaged")
            return super().__getitem__(index)

    fetchers.append(WorkerFetcher(Damaged(16), default_collate, {"num_workers": 1, "prefetch_factor": 8}))
    worker = Worker(plan, fetchers[-1])
    worker.loader.batch(0, 0)
    worker.size = 2
    assert len(contents(worker.loader.batch(0, 1))) == 2
    worker.size = 1
    with pytest.raises(KeyError, match="row 14 is damaged") as failure:
        worker.loader.batch(0, 1)
    assert "__getitem__" in str(failure.value)  # where, in the other process


def test_a_process_that_dies_is_told_of(fetchers):
    class Deadly(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            if index == 9:
                os._exit(3)
            return index

    plan = BatchPlan(samples=16, global_batch_size=8, seed=0, shuffle=False)
    fetchers.append(WorkerFetcher(Deadly(), list, {"num_workers": 1}))
    worker = Worker(plan, fetchers[-1])
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        _ = [worker.loader.batch(0, step) for step in range(2)]

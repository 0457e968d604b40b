"""Streams are dealt out exactly once, go on where they were without reading what was before, or are refused."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import IterableDataset

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime.checkpoints.state_tree import flatten, unflatten
from elasticflow_airflow.runtime.samples.sample_order import BatchPlan, ElasticLoader
from elasticflow_airflow.runtime.samples.stream_checks import alike, fingerprint, is_stream, stream_reader
from elasticflow_airflow.runtime.samples.streams import StreamBook, StreamEndError, StreamFetcher

LOGICAL = 4


class Numbers:
    """Yields each of its numbers, in another order each epoch, and counts what is read of it."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch, self.at, self.reads = count, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def order(self, epoch: int) -> list[int]:
        return random.Random(epoch).sample(range(self.count), self.count)

    def __iter__(self) -> Iterator[Any]:
        order = self.order(self.epoch)
        while self.at < self.count:
            self.at += 1
            self.reads += 1
            yield self.sample(order[self.at - 1])
        self.at = 0

    def sample(self, number: int) -> Any:
        return {"number": number, "inputs": torch.full((4,), number / 20)}


class OfTensors(Numbers):
    """Its state is a tensor, and the very one that it goes on to change."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.place = torch.zeros(1, dtype=torch.int64)

    @property
    def at(self) -> int:
        return int(self.place)

    @at.setter
    def at(self, value: int) -> None:
        if hasattr(self, "place"):
            self.place[0] = value

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["at"]


def reader_of(stream: Any, samples: int | None, **options: Any) -> Any:
    arguments: dict[str, Any] = {"collate_fn": list, "transform": None, "shuffle": None, "num_workers": 0}
    return stream_reader(stream, samples=samples, **(arguments | options))[0]


class Worker:
    """One process of a gang, as the loader sees it."""

    def __init__(self, plan: BatchPlan, stream: Any, *, processes: int = 0, transform: Any = None) -> None:
        self.plan, self.step, self.owned, self.rehearses = plan, 0, range(LOGICAL), False
        self.warnings: list[str] = []
        self.book = StreamBook(self.position)
        reader = reader_of(stream, plan.samples, transform=transform)
        self.fetcher = StreamFetcher(
            reader,
            plan,
            self.book,
            {"num_workers": processes},
            rehearses=lambda: self.rehearses,
            warn=self.warnings.append,
        )
        self.loader = ElasticLoader(
            plan, self.fetcher, logical_workers=lambda: LOGICAL, position=self.position, owned=lambda: self.owned
        )

    def position(self) -> tuple[int, int]:
        return divmod(self.step, self.plan.steps_per_epoch)

    def read(self) -> dict[int, list[int]]:
        """What each logical worker of this process gets in the step that is next."""
        batch = self.loader.batch(*self.position())
        return {share.ticket.logical: [one["number"] for one in share.content or []] for share in batch.shares}

    def take_over(self, other: Worker) -> None:
        """As a joiner does: rehearse anywhere, then take the state, through what goes over the wire."""
        self.rehearses, self.step = True, min(1, other.plan.steps_per_epoch - 1)
        self.read()
        self.loader.jump()
        description, tensors = flatten(other.book.state_dict())
        self.book.load_state_dict(unflatten(json.loads(json.dumps(description)), tensors))
        self.rehearses, self.step = False, other.step
        self.loader.jump()


def expected(plan: BatchPlan, step: int) -> list[int]:
    epoch, in_epoch = divmod(step, plan.steps_per_epoch)
    order = Numbers(plan.samples).order(epoch)
    return order[in_epoch * plan.global_batch_size : (in_epoch + 1) * plan.global_batch_size]


# -- dealing out ----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(samples=st.integers(1, 40), batch=st.integers(LOGICAL, 12), choices=st.randoms(use_true_random=False))
def test_every_sample_once_whoever_comes_goes_dies_or_reads_again(samples, batch, choices):
    plan = BatchPlan(samples=samples, global_batch_size=batch, seed=3, shuffle=False)
    kind = choices.choice([Numbers, OfTensors])
    workers = [Worker(plan, kind(samples))]
    for step in range(3 * plan.steps_per_epoch):
        event = choices.random()
        if event < 0.15:  # a restart from a checkpoint
            fresh = Worker(plan, kind(samples))
            fresh.take_over(workers[0])
            workers = [fresh]
        elif event < 0.35 and len(workers) < LOGICAL:
            joiners = [Worker(plan, kind(samples)) for _ in workers]
            for joiner, old in zip(joiners, workers, strict=True):
                joiner.take_over(old)
            workers += joiners
        for attempt in range(2):
            size = len(workers)
            got: dict[int, list[int]] = {}
            for rank, worker in enumerate(workers):
                worker.owned = range(rank * LOGICAL // size, (rank + 1) * LOGICAL // size)
                got |= worker.read()
            assert [number for logical in range(LOGICAL) for number in got[logical]] == expected(plan, step)
            if attempt or size == 1 or choices.random() < 0.6:
                break
            workers = workers[size // 2 :]  # the others died in this step: it is shared anew
        for worker in workers:
            worker.step += 1
            assert not worker.warnings


@pytest.mark.parametrize("kind", [Numbers, OfTensors])
def test_a_process_that_reads_ahead_gives_the_same(kind):
    plan = BatchPlan(samples=21, global_batch_size=6, seed=3, shuffle=False)
    here, ahead = (Worker(plan, kind(21), processes=n, transform=_Noise()) for n in (0, 1))
    other = Worker(plan, kind(21), processes=1, transform=_Noise())
    try:
        for step in range(2 * plan.steps_per_epoch):
            here.step = ahead.step = step
            assert ahead.read() == here.read()
            if step == 2:
                ahead.owned = range(2, 4)
                assert ahead.read() == {logical: here.read()[logical] for logical in (2, 3)}
                ahead.owned = range(LOGICAL)
            if step == 5:
                here.step = ahead.step = step + 1
                other.take_over(ahead)
                assert other.read() == here.read()
        assert not here.warnings + ahead.warnings + other.warnings
    finally:
        ahead.loader.close()
        other.loader.close()


class _Noise:
    """Random augmentation, drawn from two generators."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"number": (sample["number"], float(torch.rand(())), random.random())}


def test_only_own_samples_are_transformed_and_training_draws_its_own_numbers():
    class Loud(Numbers):
        def sample(self, number):
            return {"number": (number, random.random())}

    done = []
    plan = BatchPlan(samples=16, global_batch_size=8, seed=3, shuffle=False)
    worker = Worker(plan, Loud(16), transform=lambda sample: done.append(sample) or sample)
    worker.owned = range(1, 3)
    state = torch.get_rng_state(), random.getstate()
    first = worker.read()
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()
    assert len(done) == 4
    assert worker.read() == first  # what the stream itself draws, too


def test_a_ticket_that_nobody_expected_is_read_for_itself():
    plan = BatchPlan(samples=24, global_batch_size=8, seed=3, shuffle=False)
    worker = Worker(plan, Numbers(24))
    worker.read()
    (ticket,) = [t for t in worker.loader._tickets(1, 2, range(LOGICAL)) if t.logical == 3]
    assert [one["number"] for one in worker.fetcher.get([ticket])[0]] == expected(plan, 5)[6:]
    assert "reading through 16 samples" in worker.warnings[0]


@pytest.mark.parametrize(
    ("said", "processes", "message"),
    [
        (22, 0, r"the stream ended after 20 samples of epoch 0, samples=22 were said"),
        (19, 0, r"the stream goes on after the samples=19 that an epoch was said to have: .*\.take\(n\)"),
        (22, 1, r"the stream ended after 20 samples of epoch 0, samples=22 were said"),
    ],
)
def test_another_length_than_was_said(said, message, processes):
    plan = BatchPlan(samples=said, global_batch_size=8, seed=3, shuffle=False)
    worker = Worker(plan, Numbers(20), processes=processes)
    try:
        assert worker.read()
        worker.step = 1
        assert worker.read()
        worker.step = 2
        with pytest.raises(StreamEndError, match=message):
            worker.read()
    finally:
        worker.loader.close()


def test_a_state_of_another_stream_says_so():
    plan = BatchPlan(samples=20, global_batch_size=8, seed=3, shuffle=False)
    worker = Worker(plan, Numbers(20))
    worker.step = 1
    worker.book.load_state_dict({"epoch": 0, "offset": 8, "state": {"line": 3}})
    with pytest.raises(
        RuntimeError, match=r"cannot be read from the state that it had \(KeyError: 'at'\): it was built"
    ):
        worker.read()


# -- what is refused ------------------------------------------------------------------------------------------------


class _Plain(IterableDataset):
    def __iter__(self):
        yield 1


class _Buffered(Numbers):
    """Shuffles in a buffer that is in no state."""

    def __iter__(self):
        coming = super().__iter__()
        while held := list(itertools.islice(coming, 8)):
            yield from reversed(held)


class _Pickled(Numbers):
    def state_dict(self):
        return {"at": self.at, "inner": [{"random": random.Random(1)}]}


class _Moving(Numbers):
    """Draws random numbers ahead, for several samples."""

    def __iter__(self):
        drawn = [torch.rand(3) for _ in range(4)]
        for number, one in enumerate(super().__iter__()):
            yield {**one, "noise": drawn[number % 4]}


@pytest.mark.parametrize(
    ("stream", "options", "error", "message"),
    [
        (_Plain(), {}, TypeError, r"_Plain has no length or no index, .* lacks state_dict\(\), load_state_dict\(\)"),
        ((i for i in range(3)), {}, TypeError, r"generator has no length .* or give a map-style dataset"),
        (Numbers(20), {"samples": None}, ValueError, r"Numbers has no length: give .* samples=, the number of samples"),
        (Numbers(20), {"samples": 0}, ValueError, r"samples=0: an epoch must have at least one"),
        (Numbers(0), {}, ValueError, r"Numbers yields nothing: it is empty, or was read to its end before"),
        (Numbers(20), {"shuffle": True}, ValueError, r"shuffle=True: .* shuffle what the stream reads"),
        (Numbers(20), {"num_workers": 4}, ValueError, r"num_workers=4: .* Give num_workers=1, .* as transform="),
        (_Buffered(20), {}, ValueError, r"_Buffered does not go on where it was: .*\(a shuffle buffer's does not\)"),
        (_Moving(20), {}, ValueError, r"_Moving does not go on where it was: .* random numbers belong into transform="),
        (_Pickled(20), {}, TypeError, r"_Pickled.state_dict\(\) .* the state at /inner/0/random is a Random"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str | type | dict) else None,
)
def test_what_cannot_be_exact_is_refused(stream, options, error, message):
    assert is_stream(stream)
    with pytest.raises(error, match=message):
        reader_of(stream, **{"samples": 20, **options})


def test_what_only_a_stream_needs_is_refused_with_a_map(session_globals):
    session = runtime.init(epochs=1)
    with pytest.raises(ValueError, match=r"samples= is for a stream"):
        session.dataloader([1, 2, 3], global_batch_size=2, samples=3)
    with pytest.raises(ValueError, match=r"transform= is for a stream"):
        session.dataloader([1, 2, 3], global_batch_size=2, transform=str)
    with pytest.raises(TypeError, match=r"got a dict of train, test: give it one of them"):
        session.dataloader({"train": [1], "test": [2]}, global_batch_size=1)


def test_alike():
    nan = float("nan")
    for same in (1, nan, "a", b"a", [1, (nan,)], {"a": torch.tensor([1.0, nan])}, None, torch.tensor(True)):
        assert alike(same, same)
    assert not alike({"a": 1}, {"a": 2})
    assert not alike([1], [1, 2])
    assert not alike(1, 1.0)
    assert not alike(torch.zeros(2), torch.zeros(3))
    assert not alike({"a": torch.zeros(2).numpy()}, {"a": torch.ones(2).numpy()})
    assert alike(object(), object())  # nothing to compare


# -- a session ------------------------------------------------------------------------------------------------------


class Run:
    """A training on a stream of ``Numbers``, or another set, with all that was used."""

    def __init__(self, dataset: Any, *, first: str = "loader", folder: str | None = None, **options: Any) -> None:
        self.session = runtime.init(epochs=2, checkpoint_dir=folder)
        self.dataset = dataset
        torch.manual_seed(11)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        if first == "model":
            self.session.register(model=self.model, optimizer=optimizer)
        self.loader = self.session.dataloader(dataset, global_batch_size=6, **options)
        if first == "loader":
            self.session.register(model=self.model, optimizer=optimizer)
        self.optimizer = optimizer
        self.used: list[int] = []

    def train(self, terminate_before: int | None = None) -> Run:
        for _epoch in self.session.epochs():
            for batch in self.loader:
                if self.session.steps_done == terminate_before:
                    os.kill(os.getpid(), signal.SIGTERM)
                with self.session.step() as step:
                    for micro in step.split(batch):
                        step.backward(self.model(micro["inputs"]).square().mean())
                        self.used += micro["number"].tolist()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        self.loader.close()
        return self

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


def stopped(build: Any, before: int) -> Run:
    run = build()
    with pytest.raises(SystemExit) as left:
        run.train(terminate_before=before)
    assert left.value.code == 0
    return run


@pytest.mark.parametrize("first", ["loader", "model"])
@pytest.mark.parametrize("step", [0, 2, 3, 4, 6])
@pytest.mark.parametrize("kind", [Numbers, OfTensors])
def test_sigterm_saves_where_the_stream_stands(session_globals, capsys, kind, step, first):
    undisturbed = Run(kind(20), folder="undisturbed", samples=20).train()
    assert sorted(undisturbed.used) == sorted([*range(20)] * 2)
    assert undisturbed.used[:20] == Numbers(20).order(0)
    before = stopped(lambda: Run(kind(20), first=first, samples=20), step)
    after = Run(kind(20), first=first, samples=20)
    probed = after.dataset.reads
    after.train()
    assert before.used + after.used == undisturbed.used
    assert torch.equal(after.weights(), undisturbed.weights())
    assert after.dataset.reads - probed == len(after.used)  # none is read only to be skipped
    assert "reading through" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_without_its_short_last_batch(session_globals, workers):
    options = {"samples": 20, "drop_last": True, "num_workers": workers}
    undisturbed = Run(Numbers(20), folder="undisturbed", **options).train()
    assert undisturbed.used == Numbers(20).order(0)[:18] + Numbers(20).order(1)[:18]
    before = stopped(lambda: Run(Numbers(20), **options), 3)
    after = Run(Numbers(20), **options).train()
    assert before.used + after.used == undisturbed.used
    assert torch.equal(after.weights(), undisturbed.weights())


def test_a_step_that_nobody_saved_the_stream_for_is_read_up_to(session_globals, capsys):
    undisturbed = Run(Numbers(20), folder="undisturbed", samples=20).train()
    run = Run(Numbers(20), samples=20)
    run.session.begin_at(6)
    run.train()
    assert run.used == undisturbed.used[32:]
    assert "reading through 12 samples to get there" in "".join(capsys.readouterr())


def test_a_stream_with_a_length_needs_no_samples(session_globals):
    class Sized(Numbers, IterableDataset):
        def __len__(self):
            return self.count

    run = Run(Sized(20)).train()
    assert sorted(run.used) == sorted([*range(20)] * 2)
    assert (len(run.loader), run.session.total_steps) == (4, 8)


# -- Hugging Face datasets ------------------------------------------------------------------------------------------


@pytest.fixture
def hugging() -> Any:
    return pytest.importorskip("datasets", reason="Hugging Face datasets are not installed")


def rows(count: int = 20) -> dict[str, Any]:
    return {"number": list(range(count)), "inputs": [[number / 20] * 4 for number in range(count)]}


def of_files(paths):
    for path in paths:
        for line in path.read_text().splitlines():
            yield json.loads(line)


@pytest.fixture
def files(tmp_path):
    columns = rows()
    found = []
    for shard in range(4):
        found.append(tmp_path / f"{shard}.jsonl")
        lines = [{name: column[shard * 5 + i] for name, column in columns.items()} for i in range(5)]
        found[-1].write_text("\n".join(map(json.dumps, lines)))
    return found


def tensors(sample):
    return {"number": sample["number"], "inputs": torch.as_tensor(sample["inputs"], dtype=torch.float32)}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shape", ["torch", "rows", "shuffled and mapped"])
def test_map_style_datasets(session_globals, hugging, shape, workers):
    def build():
        dataset = hugging.Dataset.from_dict(rows())
        options: dict[str, Any] = {"num_workers": workers}
        if shape == "rows":
            options["collate_fn"] = lambda items: torch.utils.data.default_collate([tensors(one) for one in items])
        elif shape == "torch":
            dataset = dataset.with_format("torch")
        else:
            dataset = dataset.shuffle(seed=2).map(lambda row: {"twice": row["number"] * 2}).with_format("torch")
        return Run(dataset, **options)

    before = stopped(build, 1 + 4 * (workers > 0))
    after = build().train()
    assert sorted(before.used + after.used) == sorted([*range(20)] * 2)


STREAMS = {
    "shards": lambda hugging, files: hugging.Dataset.from_dict(rows()).to_iterable_dataset(num_shards=4),
    "torch": lambda hugging, files: (
        hugging.Dataset.from_dict(rows()).to_iterable_dataset(num_shards=4).with_format("torch")
    ),
    "batched map": lambda hugging, files: (
        hugging.Dataset.from_dict(rows())
        .to_iterable_dataset(num_shards=3)
        .map(lambda rows: {"twice": [number * 2 for number in rows["number"]]}, batched=True, batch_size=7)
    ),
    "generator": lambda hugging, files: hugging.IterableDataset.from_generator(of_files, gen_kwargs={"paths": files}),
    "shuffled shards": lambda hugging, files: hugging.IterableDataset.from_generator(
        of_files, gen_kwargs={"paths": files}
    ).shuffle(seed=5, buffer_size=1),
    "json": lambda hugging, files: hugging.load_dataset(
        "json", data_files=[str(path) for path in files], split="train", streaming=True
    ),
    "interleaved": lambda hugging, files: hugging.interleave_datasets(
        [hugging.Dataset.from_dict(rows()).filter(lambda row, k=k: row["number"] % 2 == k) for k in (0, 1)],
        probabilities=[0.5, 0.5],
        seed=1,
        stopping_strategy="all_exhausted_without_replacement",
    ).to_iterable_dataset(num_shards=2),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", STREAMS)
def test_streamed_datasets_stop_and_resume(session_globals, hugging, files, capsys, kind, workers):
    def build(**options):
        stream = STREAMS[kind](hugging, files)
        next(iter(stream))  # to look into it does no harm
        return Run(stream, samples=20, transform=tensors, **options)

    undisturbed = build(folder="undisturbed").train()
    for epoch in (undisturbed.used[:20], undisturbed.used[20:]):
        assert sorted(epoch) == list(range(20))
    before = stopped(lambda: build(num_workers=workers), 1 if workers else 4)
    after = build(num_workers=workers).train()
    assert before.used + after.used == undisturbed.used
    assert torch.equal(after.weights(), undisturbed.weights())
    assert "reading through" not in "".join(capsys.readouterr())


def test_what_datasets_can_do_and_a_state_does_not_hold(hugging):
    from datasets.distributed import split_dataset_by_node

    whole = hugging.Dataset.from_dict(rows()).to_iterable_dataset(num_shards=4)
    for stream, message in [
        (whole.shuffle(seed=1, buffer_size=100), r"a shuffle buffer \(buffer_size=100\): .*buffer_size=1\)"),
        (whole.shuffle(seed=1).map(tensors).take(5), r"a shuffle buffer \(buffer_size=1000\)"),
        (whole.shuffle(buffer_size=1), r"was given no seed: each worker, and each start, would read another order"),
        (hugging.interleave_datasets([whole, whole], probabilities=[0.5, 0.5]), r"was given no seed"),
        (split_dataset_by_node(whole, 0, 2), r"was split by split_dataset_by_node\(\): .* give it the whole stream"),
    ]:
        with pytest.raises(ValueError, match=message):
            reader_of(stream, 20)
    with pytest.raises(TypeError, match=r"got a DatasetDict of train"):
        is_stream(hugging.DatasetDict({"train": hugging.Dataset.from_dict(rows())}))


def test_the_page_trains_on_a_stream(session_globals, hugging, capsys):
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/elastic-training-script.md").read_text()
    (snippet,) = [t for t in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "samples=200" in t]
    exec(snippet, scope := {})
    assert scope["session"].steps_done == 14
    assert "elasticflow: finished step=14" in capsys.readouterr().out


def test_samples_have_the_same_fingerprint_in_every_process_and_others_another():
    sample = {"x": torch.tensor([1.0, 2.0]).bfloat16(), "y": (3, "four", [5.0]), "z": np.arange(3), "what": object()}
    same = {"x": torch.tensor([1.0, 2.0]).bfloat16(), "y": (3, "four", [5.0]), "z": np.arange(3), "what": object()}
    assert fingerprint(sample) == fingerprint(same)
    row = np.array([1.5, "text", None, np.int64(3)], dtype=object)
    program = (
        "import numpy as np, torch; from elasticflow_airflow.runtime.samples.stream_checks import fingerprint;"
        "row = np.array([1.5, 'te' + 'xt', None, np.int64(3)], dtype=object);"
        "print(fingerprint({'a': [1, 'b', 2.5], 't': torch.arange(3), 'n': np.arange(3), 'row': row}))"
    )
    elsewhere = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    here = fingerprint({"a": [1, "b", 2.5], "t": torch.arange(3), "n": np.arange(3), "row": row})
    assert int(elsewhere.stdout) == here < 1 << 53
    assert fingerprint(row) != fingerprint(np.array([1.5, "other", None, np.int64(3)], dtype=object))
    others = [
        {**sample, "x": torch.tensor([1.0, 2.5]).bfloat16()},
        {**sample, "x": torch.tensor([[1.0, 2.0]]).bfloat16()},
        {**sample, "y": (3, "four", [5])},
        {**sample, "y": (4, "four", [5.0])},
        {**sample, "z": np.arange(1, 4)},
    ]
    assert len({fingerprint(one) for one in [sample, *others]}) == 1 + len(others)

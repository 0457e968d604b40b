"""A script that a test's gang trains on a stream over files, whose optimizer keeps the books as in train_ledger.py."""

import json
import os
import random
import time
from pathlib import Path

import torch
from digests import digest_of
from torch import nn

from elasticflow_airflow import runtime

SHARDS, IN_SHARD = 5, 25  # 125 samples; the last batch of an epoch is short: 13 of 16


class Shards:
    """Lines of files, in another order of files each epoch."""

    def __init__(self, paths):
        self.paths, self.epoch, self.shard, self.line = paths, 0, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"shard": self.shard, "line": self.line, "here": torch.tensor([self.shard, self.line])}

    def load_state_dict(self, state):
        self.shard, self.line = state["shard"], state["line"]
        assert state["here"].tolist() == [self.shard, self.line]

    def __iter__(self):
        paths = random.Random(self.epoch).sample(self.paths, len(self.paths))
        while self.shard < len(paths):
            lines = paths[self.shard].read_text().splitlines()
            while self.line < len(lines):
                self.line += 1
                yield json.loads(lines[self.line - 1])
            self.shard, self.line = self.shard + 1, 0


def examples(paths):
    """The same for Hugging Face datasets."""
    for path in paths:
        for line in path.read_text().splitlines():
            yield json.loads(line)


def noisy(sample):
    """The expensive part, with random augmentation."""
    return torch.tensor(sample["inputs"]) + 0.1 * torch.randn(6), sample["number"], sample["label"]


class Books(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.uses = nn.Parameter(torch.zeros(SHARDS * IN_SHARD))

    def forward(self, inputs: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(inputs), self.uses[numbers].mean()


session = runtime.init()
torch.manual_seed(5)
folder = Path(os.environ["TEST_FILES"])
paths = sorted(folder.glob("*.jsonl"))
if os.environ.get("TEST_STREAM") == "datasets":
    from datasets import IterableDataset

    stream = IterableDataset.from_generator(examples, gen_kwargs={"paths": paths}).shuffle(seed=3, buffer_size=1)
else:
    stream = Shards(paths)
model = Books()
optimizer = torch.optim.SGD(
    [{"params": model.net.parameters(), "lr": 0.05, "momentum": 0.9}, {"params": [model.uses], "lr": 1.0}]
)
session.register(model=model, optimizer=optimizer)
loader = session.dataloader(
    stream,
    global_batch_size=16,
    samples=SHARDS * IN_SHARD,
    transform=noisy,
    num_workers=int(os.environ.get("TEST_FETCHERS", "0")),
)

for epoch in session.epochs():
    for batch in loader:
        with session.step() as step:
            for inputs, numbers, targets in step.split(batch):
                logits, used = model(inputs, numbers)
                # Its value is taken away again: the loss is that of the task, the gradient also the books'.
                step.backward(nn.functional.cross_entropy(logits, targets) + used - used.detach())
            # Of who has just joined, ``batch`` is what it rehearsed with.
            is_last = (session.steps_done + 1) % len(loader) == 0
            optimizer.param_groups[1]["lr"] = float(SHARDS * IN_SHARD % 16 if is_last else 16)
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(float((folder / os.environ["TEST_PACE"]).read_text()))
    if not session.is_warming_up:
        counts = (-model.uses.detach()).to(torch.float64)
        print(f"EPOCH {epoch} {session.steps_done} {counts.min():.6f} {counts.max():.6f}", flush=True)

print(f"WEIGHTS {digest_of(model)} {session.steps_done}", flush=True)
session.finish()

"""A script that a test's gang trains, whose optimizer keeps the books: which sample it has used, and how often.

The model has one parameter more for each sample, whose gradient is the sample's weight in the batch. Its part of the
optimizer is plain gradient descent with the batch's size as learning rate: each use of a sample takes one off.

With ``TEST_HISTORY``, a folder, each worker adds a line to the file ``steps`` there before and after each step: when,
on which machine, which process and worker of which job. The file ``hurry`` there, or in the incarnation's folder, ends
the pauses between steps.
"""

import os
import socket
import time
from pathlib import Path

import torch
from digests import digest_of
from torch import nn
from torch.utils.data import TensorDataset

from elasticflow_airflow import runtime

BATCH, SAMPLES = 32, 880  # the last batch of an epoch is short: 16 of 32

HISTORY = os.environ.get("TEST_HISTORY")

session = runtime.init()
hurry = Path(HISTORY or session.config.incarnation_dir, "hurry")
steps = os.open(Path(HISTORY, "steps"), os.O_WRONLY | os.O_APPEND | os.O_CREAT) if HISTORY else None
who = f"{socket.gethostname()} {os.getpid()} {os.environ.get('ELASTICFLOW_WORKER')} {session.config.job_id}"
torch.manual_seed(5)


class Books(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
        self.uses = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, inputs: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(inputs), self.uses[numbers].mean()


generator = torch.Generator().manual_seed(3)
data = TensorDataset(
    torch.randn(SAMPLES, 12, generator=generator),
    torch.arange(SAMPLES),
    torch.randint(0, 4, (SAMPLES,), generator=generator),
)
model = Books()
optimizer = torch.optim.SGD(
    [
        {"params": model.net.parameters(), "lr": 0.05, "momentum": 0.9},
        {"params": [model.uses], "lr": 1.0},
    ]
)
session.register(model=model, optimizer=optimizer)
loader = session.dataloader(data, global_batch_size=BATCH, num_workers=int(os.environ.get("TEST_FETCHERS", "0")))


def note() -> None:
    if steps is not None:
        os.write(steps, f"{time.time():.4f} {who} {session.steps_done}\n".encode())


for epoch in session.epochs():
    for batch in loader:
        note()
        with session.step() as step:
            for inputs, numbers, targets in step.split(batch):
                logits, used = model(inputs, numbers)
                # Its value is taken away again: the loss is that of the task, the gradient also the books'.
                step.backward(nn.functional.cross_entropy(logits, targets) + used - used.detach())
            optimizer.param_groups[1]["lr"] = float(step.batch.global_samples)
            optimizer.step()
            optimizer.zero_grad()
        note()
        if not hurry.exists():
            time.sleep(float(os.environ.get("TEST_STEP_S", "0.01")))
    if not session.is_warming_up:
        counts = (-model.uses.detach()).to(torch.float64)
        print(f"EPOCH {epoch} {session.steps_done} {counts.min():.6f} {counts.max():.6f}", flush=True)

if not session.is_warming_up:  # the training may have ended before it could join
    print(f"WEIGHTS {digest_of(model)} {session.steps_done}", flush=True)
uses = -model.uses.detach().to(torch.float64)
session.finish(metrics={"least": float(uses.min()), "most": float(uses.max()), "weights": digest_of(model)})

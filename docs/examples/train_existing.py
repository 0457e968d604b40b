"""What many teams have: DistributedDataParallel under torchrun, started once a day, with no thought of being stopped.

``torchrun --standalone --nproc-per-node=2 train_existing.py --output model.pt``. It imports nothing of this project,
saves nothing on the way, and cannot resume: docs/how-to/migrate.md makes a task with a deadline of it as it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 16  # samples of one step, on each worker


def patterns(samples: int = 1216, classes: int = 10, width: int = 64) -> TensorDataset:
    """Noisy copies of one random pattern a class, the same on every machine."""
    generator = torch.Generator().manual_seed(7)
    prototypes = torch.randn(classes, width, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    return TensorDataset(prototypes[labels] + 0.5 * torch.randn(samples, width, generator=generator), labels)


def train(output: Path, epochs: int) -> None:
    """Train, and write the weights at the end."""
    torch.manual_seed(7)
    dataset = patterns()
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(dataset, seed=7)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)  # noqa: T201
    if dist.get_rank() == 0:
        output.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), output)


def main() -> None:
    """Read the arguments, and train among the workers that torchrun has started."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    train(arguments.output, arguments.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

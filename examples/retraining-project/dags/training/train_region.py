"""Train the model of one region: a small network on patterns that stand in for a region's rows."""

from __future__ import annotations

import argparse
import zlib

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticflow_airflow import runtime


def rows_of(region: str, samples: int) -> TensorDataset:
    """Noisy copies of ten patterns, the same for a region on every machine."""
    generator = torch.Generator().manual_seed(zlib.crc32(region.encode()))
    prototypes = torch.randn(10, 32, generator=generator)
    labels = torch.randint(10, (samples,), generator=generator)
    return TensorDataset(prototypes[labels] + 0.5 * torch.randn(samples, 32, generator=generator), labels)


def main() -> None:
    """Train for as many epochs as the task says, with as many workers as the scheduler gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--region", required=True)
    parser.add_argument("--samples", type=int, default=1_600)
    arguments = parser.parse_args()

    session = runtime.init(epochs=3)
    loader = session.dataloader(rows_of(arguments.region, arguments.samples), global_batch_size=64)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session.register(model=model, optimizer=optimizer)

    for _epoch in session.epochs():
        for batch in loader:
            with session.step() as step:
                for inputs, labels in step.split(batch):
                    step.backward(nn.functional.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()

    session.finish(metrics={"region": arguments.region})


if __name__ == "__main__":
    main()

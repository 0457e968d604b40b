"""A complete elastic training script: a small network that learns to tell noisy patterns apart.

Alone: ``python train_digits.py``. As an Airflow task: ``ElasticTrainOperator(script="train_digits.py", ...)``.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

from elasticflow_airflow import runtime


def patterns(samples: int = 1503, classes: int = 10, width: int = 64) -> TensorDataset:
    """Noisy copies of one random pattern a class, the same on every machine."""
    generator = torch.Generator().manual_seed(7)
    prototypes = torch.randn(classes, width, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    return TensorDataset(prototypes[labels] + 0.5 * torch.randn(samples, width, generator=generator), labels)


def accuracy(model: nn.Module, dataset: Dataset) -> float:
    """Share of the samples that a model gets right."""
    device = next(model.parameters()).device
    model.eval()
    right, count = 0, 0
    with torch.no_grad():
        for inputs, labels in DataLoader(dataset, batch_size=100):
            right += int((model(inputs.to(device)).argmax(1).cpu() == labels).sum())
            count += len(labels)
    return right / count


def main() -> None:
    """Train."""
    session = runtime.init(epochs=3)
    training, validation = random_split(patterns(), [1203, 300], torch.Generator().manual_seed(1))
    loader = session.dataloader(training, global_batch_size=32)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session.register(model=model, optimizer=optimizer)

    for _epoch in session.epochs():
        for batch in loader:
            with session.step() as step:
                for inputs, labels in step.split(batch):
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                    step.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    session.finish(metrics={"accuracy": accuracy(model, validation)})


if __name__ == "__main__":
    main()

"""A complete elastic training on sequences of very different lengths: those of similar length share a batch.

A batch is padded to its longest sequence, and what is padded is computed in vain: ``lengths=`` leaves little of it.
Alone: ``python train_lengths.py``. As an Airflow task: ``ElasticTrainOperator(script="train_lengths.py", ...)``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from elasticflow_airflow import runtime

TOKENS, CLASSES, LONGEST, PADDING = 500, 5, 200, 0


class Sequences(Dataset):
    """Sequences of 5 to LONGEST tokens, and their classes: a class prefers some tokens."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = (5 + (LONGEST - 5) * torch.rand(samples, generator=generator) ** 2).long()
        self.labels = torch.randint(CLASSES, (samples,), generator=generator)
        common = torch.randint(1, TOKENS, (int(self.lengths.sum()),), generator=generator).split(self.lengths.tolist())
        own = torch.rand(samples, LONGEST, generator=generator) < 0.3
        self.tokens = [
            torch.where(own[i, : len(part)], part - part % CLASSES + self.labels[i], part).clamp(1, TOKENS - 1)
            for i, part in enumerate(common)
        ]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.labels[index]


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pad to the longest sequence of the batch: (samples, longest), and classes."""
    tokens, labels = zip(*samples, strict=True)
    return pad_sequence(list(tokens), batch_first=True, padding_value=PADDING), torch.stack(labels)


class Classifier(nn.Module):
    """One layer of a recurrent network, averaged over the tokens that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 32, padding_idx=PADDING)
        self.recurrent = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (samples, longest) to logits (samples, CLASSES)."""
        states, _ = self.recurrent(self.embedding(tokens))
        real = (tokens != PADDING).unsqueeze(2)
        return self.head((states * real).sum(dim=1) / real.sum(dim=1))


@torch.no_grad()
def accuracy(model: nn.Module, dataset: Dataset, device: torch.device) -> float:
    """Share of the samples that a model gets right."""
    right = [
        (model(tokens.to(device)).argmax(1).cpu() == labels).sum()
        for tokens, labels in DataLoader(dataset, batch_size=100, collate_fn=collate)
    ]
    return int(torch.stack(right).sum()) / len(dataset)


def main() -> None:
    """Train."""
    session = runtime.init(epochs=4)
    training = Sequences(1500, seed=7)
    loader = session.dataloader(training, global_batch_size=32, collate_fn=collate, lengths=training.lengths)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    session.register(model=model, optimizer=optimizer)

    computed = real = 0
    for _epoch in session.epochs():
        for batch in loader:
            with session.step() as step:
                for tokens, labels in step.split(batch):
                    step.backward(nn.functional.cross_entropy(model(tokens), labels))
                    computed, real = computed + tokens.numel(), real + int((tokens != PADDING).sum())
                optimizer.step()
                optimizer.zero_grad()

    metrics = {"accuracy": accuracy(model, Sequences(500, seed=8), session.device)}
    if computed:  # of this worker, since it has started
        metrics["padding"] = 1 - real / computed
    session.finish(metrics=metrics)


if __name__ == "__main__":
    main()

"""Fine-tune a pretrained BERT to tell packages by their docstrings: an ordinary training script, made elastic.

Under the elasticflow service the length and the batch size come from the Airflow task, and the number of workers may
change at any step. Alone it does the same with one worker::

    python train_bert.py --data FOLDER --epochs 2

What makes it elastic: ``session.register`` names what a checkpoint holds, ``session.dataloader`` deals out the
samples, and ``session.step`` is the boundary at which workers may come, save or go.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import docstrings
import torch
from model import TextClassifier, tokenise, warm_up_then_decay
from torch.nn import functional
from torch.utils.data import Dataset

from elasticflow_airflow import runtime


class Texts(Dataset):
    """Tokenised texts with their labels, all of one length."""

    def __init__(self, rows: list[docstrings.Row], max_length: int) -> None:
        self._tokens = tokenise([row.text for row in rows], max_length)
        self._labels = torch.tensor([row.label for row in rows])

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self._tokens.items()} | {"label": self._labels[index]}


def main() -> None:
    """Train, and say that it is done."""
    args = parse_arguments()
    session = runtime.init(epochs=args.epochs)

    dataset = Texts(docstrings.read(args.data / "train.jsonl"), args.max_length)
    loader = session.dataloader(dataset, global_batch_size=args.batch, shuffle=True)

    model = TextClassifier(len(docstrings.PACKAGES))
    model.train_only_top(args.top_layers)
    optimizer = torch.optim.AdamW(model.parameter_groups(args.lr))
    schedule = warm_up_then_decay(optimizer, session.total_steps)
    session.register(model=model, optimizer=optimizer, scheduler=schedule)

    model.train()
    for _epoch in session.epochs():
        for batch in loader:
            with session.step() as step:
                for micro in step.split(batch):
                    labels = micro.pop("label")
                    loss = functional.cross_entropy(model(**micro), labels)
                    step.backward(loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            session.log(loss=step.loss)
    session.finish(metrics={"max_length": args.max_length})


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl, as extract writes it")
    parser.add_argument("--max-length", type=int, default=48, help="tokens of a text that are read")
    parser.add_argument("--lr", type=float, default=2e-4, help="highest learning rate of the pretrained layers")
    parser.add_argument("--top-layers", type=int, default=6, help="how many layers are trained, from the top")
    parser.add_argument("--epochs", type=int, default=1, help="length, where nobody else says it")
    parser.add_argument("--batch", type=int, default=32, help="global batch size, where nobody else says it")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""How good are today's models? Accuracy on the test split, beside guessing and beside a probe on the frozen encoder.

The probe is a logistic regression on the mean-pooled embeddings of the encoder as it was pretrained: what one gets
without any fine-tuning. Prints a table and writes the same as JSON. Runs as a process of its own, so that whoever
starts it need not load torch::

    python evaluate.py --data FOLDER --out result.json --checkpoint quick=PATH:32 --checkpoint thorough=PATH:48
"""

from __future__ import annotations

import argparse
import collections
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# On a busy machine threads that wait by spinning take the cores from those that compute.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import docstrings
import torch
from model import TextClassifier, tokenise
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from elasticflow_airflow.runtime import load_weights

TEXTS_AT_ONCE = 32
PROBE_TEXTS = 480
"""The probe is fitted on so many training texts: it hardly gets better with more, and each costs time."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One fine-tuned model: its name, its checkpoint, and how many tokens of a text it reads."""

    name: str
    checkpoint: Path
    max_length: int

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Read ``name=path:max_length``."""
        name, _, rest = text.partition("=")
        path, _, length = rest.rpartition(":")
        if not (name and path and length.isdigit()):
            raise argparse.ArgumentTypeError(f"{text!r} is not name=path:max_length")
        return cls(name, Path(path), int(length))


def main() -> None:
    """Evaluate every candidate on the same texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--checkpoint", type=Candidate.parse, action="append", required=True, dest="candidates")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    args = parser.parse_args()

    train, test = docstrings.read(args.data / "train.jsonl"), docstrings.read(args.data / "test.jsonl")
    labels = torch.tensor([row.label for row in test])
    model = TextClassifier(len(docstrings.PACKAGES)).eval()
    longest = max(candidate.max_length for candidate in args.candidates)
    result = {
        "texts": len(test),
        "majority": majority(train, test),
        "probe": probe(model, train[:PROBE_TEXTS], test, longest),
        "models": {},
    }
    for candidate in args.candidates:
        load_weights(model, candidate.checkpoint)
        tokens = tokenise([row.text for row in test], candidate.max_length)
        guesses = apply(model, tokens).argmax(1)
        result["models"][candidate.name] = (guesses == labels).double().mean().item()
    print(table(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


def majority(train: list[docstrings.Row], test: list[docstrings.Row]) -> float:
    """Accuracy of always guessing the most frequent class of the training texts."""
    (label, _), *_ = collections.Counter(row.label for row in train).most_common(1)
    return sum(row.label == label for row in test) / len(test)


def probe(model: TextClassifier, train: list[docstrings.Row], test: list[docstrings.Row], max_length: int) -> float:
    """Accuracy of a logistic regression on the embeddings of the encoder as it is now."""
    inputs = [apply(model.embed, tokenise([row.text for row in rows], max_length)).numpy() for rows in (train, test)]
    regression = LogisticRegression(max_iter=2000).fit(inputs[0], [row.label for row in train])
    return float(regression.score(inputs[1], [row.label for row in test]))


@torch.inference_mode()
def apply(function: Callable[..., Tensor], tokens: dict[str, Tensor]) -> Tensor:
    """Apply a function to all texts, some of about the same length at a time: the padding is not computed."""
    lengths = tokens["attention_mask"].sum(1)
    order = lengths.argsort()
    outputs = []
    for chosen in order.split(TEXTS_AT_ONCE):
        longest = int(lengths[chosen].max())
        outputs.append(function(**{name: values[chosen, :longest] for name, values in tokens.items()}))
    return torch.cat(outputs)[order.argsort()]


def table(result: dict) -> str:
    """Write the result for people."""
    rows = [("always the most frequent package", result["majority"]), ("probe on the frozen encoder", result["probe"])]
    rows += [(f"fine-tuned: {name}", accuracy) for name, accuracy in result["models"].items()]
    lines = [f"accuracy on {result['texts']} docstrings of modules that were never trained on:"]
    return "\n".join(lines + [f"  {name:<34} {accuracy:6.1%}" for name, accuracy in rows])


if __name__ == "__main__":
    main()

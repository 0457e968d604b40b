"""A complete elastic script with Hugging Face's Trainer: a tiny BERT learns which of two words a sentence has more of.

Alone: ``python train_trainer.py``. As an Airflow task: ``ElasticTrainOperator(script="train_trainer.py", ...)``.
"""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from elasticflow_airflow.runtime.transformers import ElasticCallback


class Sentences(Dataset):
    """Random sentences of eleven words, from a vocabulary of two; the same on every machine."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, 3, (samples, 11), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": (self.words[index].float().mean() > 1.5).long()}


def accuracy(prediction: tuple) -> dict[str, float]:
    """What ``compute_metrics`` is given are the predictions for the whole validation set."""
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def main() -> None:
    """Train."""
    set_seed(0)  # the weights to begin with are drawn from it
    config = BertConfig(vocab_size=3, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            output_dir="trainer-output",
            num_train_epochs=3,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            warmup_steps=10,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            report_to=[],
        ),
        train_dataset=Sentences(600, seed=1),
        eval_dataset=Sentences(100, seed=2),
        compute_metrics=accuracy,
        callbacks=[ElasticCallback()],
    )
    trainer.train()
    trainer.save_model("best")


if __name__ == "__main__":
    main()

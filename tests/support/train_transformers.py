"""A Trainer script that a test's gang trains: a tiny BERT or GPT-2, dropout, warm-up and cosine, clipping.

Nothing in it knows of workers but the callback. It prints the digests of the weights and of what it logged.
TEST_KIND: classify, mask (BertForMaskedLM, which ignores num_items_in_batch) or gpt2; TEST_ARGUMENTS: more of
TrainingArguments, as JSON; TEST_STOP: the patience of early stopping; TEST_DIE_AT: the step after which the first
worker dies over saving, with TEST_TORN torn.
"""

import hashlib
import json
import os
import signal
import sys
import time

import torch
from digests import digest_of
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from elasticflow_airflow.runtime.transformers import ElasticCallback

KIND, ROOT = os.environ.get("TEST_KIND", "classify"), os.environ["TEST_ROOT"]
VOCABULARY = 50
BERT = BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
)


class Sentences(torch.utils.data.Dataset):
    """Of 5 to 11 random words; a fixed function of the index."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.first + index)
        length = int(torch.randint(5, 12, (1,), generator=generator))
        words = torch.randint(2, VOCABULARY, (length,), generator=generator)
        return {"input_ids": words, "label": int(words.float().mean() > VOCABULARY / 2)}


def collate(sentences):
    words = torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in sentences], batch_first=True)
    mask = (words > 0).long()
    if KIND == "classify":
        labels = torch.tensor([s["label"] for s in sentences])
    elif KIND == "gpt2":
        labels = words.masked_fill(words == 0, -100)
    else:
        chosen = (torch.rand(words.shape) < 0.3) & (words > 0)  # masked anew whenever it is fetched
        labels = words.masked_fill(~chosen, -100)
        words = words.masked_fill(chosen, 1)
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def build():
    if KIND == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    return BertForSequenceClassification(BERT) if KIND == "classify" else BertForMaskedLM(BERT)


class Pace(TrainerCallback):
    """Holds after a step while the test says so, and makes slow steps until it is in a hurry."""

    def on_step_end(self, args, state, control, **kwargs):
        while os.path.exists(f"{ROOT}/hold"):
            time.sleep(0.02)
        if not os.path.exists(f"{ROOT}/hurry"):
            time.sleep(float(os.environ.get("TEST_STEP_S", "0")))


passes = 0


def tell_warm(model, inputs, outputs):
    """A joiner rehearses four steps: of its 8 logical workers no more than these are its own."""
    global passes
    passes += model.training
    if passes == 32 // int(os.environ.get("WORLD_SIZE", "1")):
        open(f"{ROOT}/warm-{os.environ.get('ELASTICFLOW_WORKER')}", "w").close()


class Dies(Trainer):
    """Is killed once, in the middle of writing a file of a checkpoint."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        if self.state.global_step == int(os.environ.get("TEST_DIE_AT", "-1")) and not os.path.exists(f"{ROOT}/died"):
            open(f"{ROOT}/died", "w").close()
            written = (f"{ROOT}/out/checkpoint-{self.state.global_step}/{name}" for name in AS_WRITTEN)
            torn = os.environ["TEST_TORN"]
            for path in written:
                if os.path.basename(path) == torn:
                    os.truncate(path, os.path.getsize(path) // 2)
                    torn = None
                elif torn is None:
                    os.remove(path)
            os.kill(os.getpid(), signal.SIGKILL)


AS_WRITTEN = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
set_seed(5)
arguments = {
    "output_dir": f"{ROOT}/out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "num_train_epochs": 4,
    "learning_rate": 3e-3,
    "warmup_steps": 3,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.01,
    "logging_steps": 3,
    "save_strategy": "no",
    "include_num_input_tokens_seen": "all",
    "use_cpu": True,
    "report_to": [],
} | json.loads(os.environ.get("TEST_ARGUMENTS", "{}"))
callbacks = [ElasticCallback(checkpoint_dir=f"{ROOT}/alone"), Pace]
if "TEST_STOP" in os.environ:
    callbacks.append(EarlyStoppingCallback(int(os.environ["TEST_STOP"])))
model = build()
model.register_forward_hook(tell_warm)
trainer = Dies(
    model=model,
    args=TrainingArguments(**arguments),
    train_dataset=Sentences(0, 74),  # the last batch of an epoch is short: 10 of 16
    eval_dataset=Sentences(1000, 10),
    data_collator=collate,
    callbacks=callbacks,
)
output = trainer.train(resume_from_checkpoint=os.environ.get("TEST_RESUME"))
timing = ("runtime", "per_second")
history = [{k: v for k, v in line.items() if not any(t in k for t in timing)} for line in trainer.state.log_history]
logged = hashlib.sha256(json.dumps(history).encode()).hexdigest()
end = f"END {digest_of(trainer.model)} {trainer.state.global_step} {output.training_loss!r} {logged}\n"
os.write(1, end.encode())  # in one piece: workers of torchrun share their output
sys.stderr.write(json.dumps(history) + "\n")

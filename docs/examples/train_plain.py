"""A plain torchrun script, which knows nothing of elastic training: it saves on SIGTERM, and resumes.

By itself: ``torchrun --standalone --nproc-per-node=2 train_plain.py --folder checkpoints``. As an Airflow task:
``ElasticTrainOperator(script="train_plain.py", progress_regex=..., ...)``. It imports nothing of this project.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32  # samples of one step, over all workers; DDP weighs the workers alike, so they must divide it
SEED = 7


def patterns(samples: int = 1216, classes: int = 10, width: int = 64) -> TensorDataset:
    """Noisy copies of one random pattern a class, the same on every machine."""
    generator = torch.Generator().manual_seed(SEED)
    prototypes = torch.randn(classes, width, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    return TensorDataset(prototypes[labels] + 0.5 * torch.randn(samples, width, generator=generator), labels)


def my_batches(samples: int, epoch: int, first: int) -> list[list[int]]:
    """My share of each batch of an epoch from the ``first`` on: the batches are the same for any number of workers."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
    batches = [order[start : start + BATCH] for start in range(0, samples, BATCH)]
    return [batch[dist.get_rank() :: dist.get_world_size()] for batch in batches[first:]]


def came_to_anybody(came: bool, device: torch.device) -> bool:
    """Whether SIGTERM came to any of the workers. All must ask after every step, to stop after the same one."""
    votes = torch.tensor(float(came), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes)


def save(file: Path, **state: object) -> None:
    """Write beside the file, then rename: whoever is killed meanwhile leaves the one before."""
    new = file.with_suffix(".new")
    torch.save(state, new)
    new.replace(file)


def train(arguments: argparse.Namespace, device: torch.device, sigterm: threading.Event) -> None:
    """Go on from the last checkpoint, to the end or until SIGTERM."""
    is_first = dist.get_rank() == 0
    torch.manual_seed(SEED)
    dataset = patterns()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    arguments.folder.mkdir(parents=True, exist_ok=True)
    file, done = arguments.folder / "last.pt", 0
    if file.exists():
        state = torch.load(file, weights_only=True, map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]

    per_epoch = -(-len(dataset) // BATCH)
    stopping = False
    while done < per_epoch * arguments.epochs and not stopping:
        epoch, first = divmod(done, per_epoch)
        for inputs, labels in DataLoader(dataset, batch_sampler=my_batches(len(dataset), epoch, first)):
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            stopping = came_to_anybody(sigterm.is_set(), device)
            if is_first:
                print(f"step {done} loss {loss.item():.4f}", flush=True)  # noqa: T201  (this is how progress is told)
                if stopping or done % arguments.save_every == 0:
                    save(file, model=model.module.state_dict(), optimizer=optimizer.state_dict(), done=done)
            if stopping:
                break

    if is_first and not stopping:
        save(file, model=model.module.state_dict(), optimizer=optimizer.state_dict(), done=done)
        inputs, labels = dataset.tensors
        with torch.no_grad():
            right = model.module(inputs.to(device)).argmax(1).cpu() == labels
        print(f"finished with accuracy {right.float().mean():.3f}", flush=True)  # noqa: T201


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are, for all workers")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    arguments = parser.parse_args()

    sigterm = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: sigterm.set())
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(arguments, device, sigterm)
    # The model is gone by now: where DistributedDataParallel lets go of the group as the last, gloo may hang.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

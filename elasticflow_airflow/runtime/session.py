"""The session: what a training script talks to, the same alone, under a bare torchrun and under the service.

At this level workers come and go by stop, save and restart: a session told to leave saves at the next step boundary
and ends with status 0; the next generation resumes from the checkpoint that was promoted. Scripts assume none of
that: rank and number of workers are asked of the session, never remembered.
May import torch and the standard library only.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from elasticflow_airflow.runtime import bootstrap, checkpoint
from elasticflow_airflow.runtime.checkpoint import Registered, Stateful
from elasticflow_airflow.runtime.context import Context, detect
from elasticflow_airflow.runtime.data import BatchPlan, ElasticLoader, mix_seed
from elasticflow_airflow.runtime.group import WorkerGroup
from elasticflow_airflow.runtime.manifest import CandidateInfo, CheckpointError, promote, remove_old
from elasticflow_airflow.runtime.protocol import ReportKind
from elasticflow_airflow.runtime.reduction import broadcast_model, refuse_unsupported
from elasticflow_airflow.runtime.reporting import Speedometer
from elasticflow_airflow.runtime.resume import agree_on_checkpoint
from elasticflow_airflow.runtime.step import Step


class Leaving(SystemExit):
    """Ends the script with status 0 after the state was saved; ``except Exception`` does not catch it."""

    def __init__(self) -> None:
        super().__init__(0)


class NonFiniteLoss(FloatingPointError):  # noqa: N818  (it is named for what it is)
    """The loss, or a weight, is NaN or infinite: what would be trained from here on is worth nothing."""


class Session:
    """One worker's view of one training run. Made by :func:`elasticflow_airflow.runtime.init`."""

    def __init__(
        self,
        context: Context,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        micro_batch_size: int | None = None,
        init_from: str | Path | None = None,
        checkpoint_interval_s: float | None = None,
        allow_nonfinite_loss: bool = False,
    ) -> None:
        config = context.config
        if config.steps is None and config.epochs is None:
            config = replace(config, steps=steps, epochs=epochs)
        if config.micro_batch_size is None:
            config = replace(config, micro_batch_size=micro_batch_size)
        if config.init_from is None and init_from is not None:
            config = replace(config, init_from=str(init_from))
        if checkpoint_interval_s is not None and not context.managed:
            config = replace(config, checkpoint_interval_s=checkpoint_interval_s)
        self.config = config
        self.device = _pick_device()
        self._context = context
        self._allow_nonfinite_loss = allow_nonfinite_loss
        self._group = WorkerGroup(self.device)
        torch.manual_seed(mix_seed(config.seed, 0x1717))
        self._terminated = False
        self._pid = os.getpid()
        self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        self._registered: Registered | None = None
        self._loader: ElasticLoader | None = None
        self._script_epochs: int | None = None
        self._step = 0
        self._started = self._leaving = self._saving = self._finished = False
        self._resumed_from: CandidateInfo | None = None
        self._initialised_from: str | None = None
        self._loss: float | None = None
        self._scalars: dict[str, float] = {}
        self._saved_at_s = time.monotonic()
        self._speed = Speedometer(context.reporter.interval_s)
        bootstrap.session_initialised = True
        if context.managed:
            atexit.register(self._say_how_far)

    # -- where we are -------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this worker now; it may change at a step boundary. After ``finish`` it stays."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """Number of workers now; it may change at a step boundary."""
        return self._group.size

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints and saves."""
        return self.rank == 0

    @property
    def steps_done(self) -> int:
        """Optimizer steps done in all, over every generation."""
        return self._step

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 0."""
        return self._position()[0]

    @property
    def total_steps(self) -> int:
        """Length of the training in steps. Raises ValueError while nobody has said it."""
        total = self._total_or_none()
        if total is None:
            raise ValueError(
                "the length of the training is not known yet: give epochs= or steps= to runtime.init(), and call "
                "session.dataloader() before asking for total_steps"
            )
        return total

    # -- set-up -------------------------------------------------------------------------------------------------

    def register(
        self,
        *,
        model: nn.Module,
        optimizer: Stateful | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        **others: Stateful,
    ) -> None:
        """Name what a checkpoint holds, and restore it: from the one to resume from, else ``init_from``'s weights.

        Call it once, when everything is built. Raises CheckpointError when a checkpoint does not fit.
        """
        if self._registered is not None:
            raise ValueError("session.register() was called before; name everything in one call")
        refuse_unsupported(model)
        named = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, **others}
        self._registered = Registered(model, {name: part for name, part in named.items() if part is not None})
        model.to(self.device)
        try:
            self._restore(self._registered)
        except CheckpointError as error:
            self._say(ReportKind.FAILED, message=str(error), kind="bad_checkpoint")
            raise

    def dataloader(
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> ElasticLoader:
        """Deal out a map-style training set: every sample of an epoch exactly once, whoever trains.

        ``global_batch_size`` counts samples of one optimizer step over all workers; under the service the submitted
        one is used. Other ``options`` go to ``torch.utils.data.DataLoader``. For validation use an ordinary loader.
        """
        if self._loader is not None:
            raise ValueError("session.dataloader() is for the training set and may be called once")
        size = self.config.global_batch_size if self._context.managed else global_batch_size
        if size is None:
            raise ValueError("session.dataloader() needs global_batch_size= when the script runs without the service")
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"session.dataloader() needs a map-style dataset, with __len__ and __getitem__; "
                f"{type(dataset).__name__} has no length, so nobody could say which of its samples were used"
            )
        samples = len(dataset)
        plan = BatchPlan(samples=samples, global_batch_size=size, seed=self.config.seed, shuffle=shuffle)
        said = self.config.samples
        if said is not None and said != samples:
            self._warn(f"the submission says samples={said}, the dataset has {samples}; the dataset counts")
        self._loader = ElasticLoader(
            dataset,
            plan,
            position=self._position,
            workers=lambda: (self.rank, self.world_size),
            finished=self._all_done,
            collate_fn=collate_fn,
            num_workers=num_workers,
            **options,
        )
        return self._loader

    # -- training -----------------------------------------------------------------------------------------------

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Yield the epochs that are left, the one under way included, until all steps are done.

        ``count`` is the script's own idea of the length; what the service or ``runtime.init`` says wins.
        """
        self._script_epochs = count
        if self._loader is None:
            raise ValueError("call session.dataloader() before session.epochs()")
        self._start()
        while not self._all_done():
            before = self._step
            yield self.epoch
            if self._step == before:
                raise RuntimeError("an epoch went by without a session.step(): every batch needs one")

    def step(self) -> Step:
        """Open one optimizer step: the boundary at which this worker may save, or save and leave."""
        if self._registered is None:
            raise ValueError("call session.register() before session.step()")
        if self._finished:
            raise RuntimeError("session.step() after session.finish(): the result is out already")
        self._start()
        self._boundary()
        seed = mix_seed(self.config.seed, self._step, self.rank)
        return Step(self, self._registered.model, self.config.micro_batch_size, seed, self._position())

    def log(self, **scalars: float | Tensor) -> None:
        """Attach numbers to the next progress report, ``loss`` among them; its own epoch and speed stay."""
        for name, value in scalars.items():
            self._scalars[name] = float(value)

    def finish(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Say that training is done: the final checkpoint, with ``metrics``, becomes the job's result."""
        if self._finished:
            return
        self._start()
        self._progress()
        info = self._save()
        self._finished = True
        data = {"metrics": dict(metrics or {}), "loss": self._loss, "path": self._relative(info)}
        self._group.wait_for_all()
        self._say_if_main(ReportKind.FINISHED, **data)
        self._group.disband()
        # What the script does from here on is its own; a SIGTERM ends it again.
        signal.signal(signal.SIGTERM, self._previous_handler or signal.SIG_DFL)

    # -- called by Step -----------------------------------------------------------------------------------------

    def step_failed(self, error: BaseException, micro_batch_size: int) -> None:
        """Report an out-of-memory with the micro-batch that was too large."""
        if bootstrap.is_out_of_memory(error):
            self._say(ReportKind.OUT_OF_MEMORY, micro_batch_size=micro_batch_size, message=str(error)[:500])

    def step_done(self, loss: float) -> float:
        """Count a step. ``loss`` is this worker's part of the mean; returns the mean over the global batch.

        Here all workers agree, in one small sum, on whether to save or to leave at the next boundary.
        """
        leaving = self._terminated or (self.is_main and self._context.told_to_leave())
        saving = self.is_main and time.monotonic() - self._saved_at_s >= self.config.checkpoint_interval_s
        loss, leave_votes, save_votes = self._group.sum([loss, float(leaving), float(saving)])
        self._leaving, self._saving = leave_votes > 0, save_votes > 0
        self._step += 1
        bootstrap.current_step = self._step
        self._speed.step_done()
        self._loss = loss
        if not math.isfinite(loss) and not self._allow_nonfinite_loss:
            self._diverged(f"the loss is {loss} at step {self._step}")
        if self._speed.due:
            self._progress()
        return loss

    # -- inside -------------------------------------------------------------------------------------------------

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A process that the script has forked: it has no step boundary to leave at.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self._terminated = True

    def _position(self) -> tuple[int, int]:
        per_epoch = self._loader.plan.steps_per_epoch if self._loader else max(1, self._step + 1)
        return divmod(self._step, per_epoch)

    def _total_or_none(self) -> int | None:
        if self.config.steps is not None:
            return self.config.steps
        epochs = self.config.epochs or self._script_epochs
        if epochs is None or self._loader is None:
            return None
        return epochs * self._loader.plan.steps_per_epoch

    def _all_done(self) -> bool:
        total = self._total_or_none()
        return total is not None and self._step >= total

    def _restore(self, registered: Registered) -> None:
        found = agree_on_checkpoint(self._context.checkpoints, self.config.incarnation, self._warn)
        if found is not None:
            checkpoint.load(registered, found)
            self._step, self._resumed_from, self._loss = found.step, found, found.metadata.get("loss")
            bootstrap.current_step = self._step
            return
        if self.config.init_from is not None:
            checkpoint.load_weights(registered.model, Path(self.config.init_from))
            self._initialised_from = self.config.init_from
        if self.world_size > 1:
            broadcast_model(registered.model)

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        samples = self._loader.plan.samples if self._loader else None
        total = self._total_or_none()
        if total is None:
            raise ValueError(
                "nobody has said how long to train: call session.epochs(n), or give steps= or epochs= to runtime.init()"
            )
        micro = self.config.micro_batch_size
        if micro is None and self._loader is not None:
            micro = -(-self._loader.plan.global_batch_size // self.world_size)
        self._check_same_data()
        self._say(
            ReportKind.STARTED,
            samples=samples,
            steps=total,
            micro_batch_size=micro,
            resumed_from=self._relative(self._resumed_from),
            init_from=self._initialised_from,
        )
        self._speed.leave_out()
        self._saved_at_s = time.monotonic()

    def _check_same_data(self) -> None:
        if self._resumed_from is None or self._loader is None:
            return
        changes = self._loader.plan.changes_since(self._resumed_from.metadata)
        if changes:
            self._warn(
                f"the checkpoint was written with other data settings ({changes}): training goes on at step "
                f"{self._step}, but samples of this epoch may be used twice or not at all"
            )

    def _boundary(self) -> None:
        if self._leaving:
            self._leave()
        if self._saving:
            self._save()
            self._saving = False
            self._speed.leave_out()

    def _leave(self) -> None:
        self._progress()
        self._save()
        # Everybody waits for the save: torchrun would otherwise keep who is early in its exit barrier.
        self._group.wait_for_all()
        self._say_if_main(ReportKind.STOPPED)
        self._group.disband()
        raise Leaving

    def _diverged(self, what: str) -> NoReturn:
        message = (
            f"{what}: nothing after it would be worth keeping. Lower the learning rate, clip gradients or look at the "
            "batch; checkpoints from before stay valid."
        )
        self._say(ReportKind.FAILED, message=message, kind="nan_loss")
        raise NonFiniteLoss(message)

    def _save(self) -> CandidateInfo | None:
        """Write a checkpoint (rank 0 only; every worker has the same state)."""
        self._saved_at_s = time.monotonic()
        if not self.is_main or self._registered is None:
            return None
        if not self._allow_nonfinite_loss and not _all_finite(self._registered.model):
            # A finite loss with gradients that are not: found here, or the checkpoint would be spoilt.
            self._diverged(f"the model has weights that are no numbers after step {self._step}")
        began_s = time.perf_counter()
        epoch, step_in_epoch = self._position()
        try:
            info = checkpoint.save(
                self._registered,
                self._context.checkpoints,
                incarnation=self.config.incarnation,
                generation=self._context.generation,
                step=self._step,
                metadata={
                    "epoch": epoch,
                    "step_in_epoch": step_in_epoch,
                    "loss": _finite_or_none(self._loss),
                    **(asdict(self._loader.plan) if self._loader else {}),
                },
            )
            if not self._context.managed:
                promote(self._context.checkpoints, info)
                remove_old(self._context.checkpoints, self.config.keep_checkpoints)
        except CheckpointError as error:
            self._say(ReportKind.FAILED, message=str(error), kind="checkpoint_not_written")
            raise
        self._say(
            ReportKind.CHECKPOINT,
            path=self._relative(info),
            digest=info.digest,
            size_bytes=info.size_bytes,
            write_s=time.perf_counter() - began_s,
        )
        return info

    def _relative(self, info: CandidateInfo | None) -> str | None:
        return None if info is None else str(info.path.relative_to(self._context.checkpoints))

    def _progress(self) -> None:
        steps, seconds = self._speed.take()
        if not steps:
            return
        own = {"window_steps": steps, "window_s": seconds, "epoch": self.epoch}
        data: dict[str, Any] = own | {"loss": self._loss} | self._scalars | own
        if self._allow_nonfinite_loss:
            # A reader of the reports would end the training over it.
            data["loss"] = _finite_or_none(data["loss"])
        self._say_if_main(ReportKind.PROGRESS, **data)

    def _say_how_far(self) -> None:
        """At the end of a process that is not finished: the steps since the last report."""
        folder = Path(self.config.incarnation_dir)
        if self._started and not self._finished and os.getpid() == self._pid and folder.is_dir():
            self._progress()

    def _warn(self, message: str) -> None:
        self._say_if_main(ReportKind.WARNING, message=message)

    def _say(self, what: ReportKind, /, **data: Any) -> None:
        self._context.reporter.say(what, self.rank, self._step, **data)

    def _say_if_main(self, what: ReportKind, /, **data: Any) -> None:
        if self.is_main:
            self._say(what, **data)


def init(
    *,
    epochs: int | None = None,
    steps: int | None = None,
    micro_batch_size: int | None = None,
    init_from: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_interval_s: float | None = None,
    allow_nonfinite_loss: bool = False,
) -> Session:
    """Join the training: alone, under torchrun, or under the service; the same call.

    ``epochs`` or ``steps`` is the script's own length, ``micro_batch_size`` the most samples in one forward pass,
    ``init_from`` the folder of a checkpoint whose weights to start from, ``checkpoint_dir`` where to keep
    checkpoints (``ELASTICFLOW_CHECKPOINT_DIR``, else ``./elasticflow-checkpoints``),
    ``checkpoint_interval_s`` how often to save (60 s); under the service what was
    submitted wins over all of them. Raises ValueError for lengths that contradict each other.
    """
    if epochs is not None and steps is not None:
        raise ValueError("give steps= or epochs=, not both")
    return Session(
        detect(checkpoint_dir),
        epochs=epochs,
        steps=steps,
        micro_batch_size=micro_batch_size,
        init_from=init_from,
        checkpoint_interval_s=checkpoint_interval_s,
        allow_nonfinite_loss=allow_nonfinite_loss,
    )


def _pick_device() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _all_finite(model: nn.Module) -> bool:
    """Whether no weight is NaN or infinite. Eight times faster than ``isfinite().all()``, which makes a mask."""
    weights = [p.detach() for p in model.parameters() if p.is_floating_point() and p.numel()]
    return all(bool(bound.isfinite()) for weight in weights for bound in torch.aminmax(weight))


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

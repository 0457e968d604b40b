"""Core of a session: its state, its position, checkpoints and reports. See session.py for the public interface.

May import torch and the standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from elasticflow_airflow import bounds
from elasticflow_airflow.runtime import bootstrap
from elasticflow_airflow.runtime.checkpoints import checkpoint
from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.checkpoints.checkpointer import Saved
from elasticflow_airflow.runtime.checkpoints.interval import SaveInterval
from elasticflow_airflow.runtime.checkpoints.saving import PARTS_LIMIT_S, Saver
from elasticflow_airflow.runtime.checkpoints.state_copy import size_of
from elasticflow_airflow.runtime.context import Context
from elasticflow_airflow.runtime.gang.membership import Dismissed, GroupMember
from elasticflow_airflow.runtime.gang.process_group import WorkerGroup
from elasticflow_airflow.runtime.gang.resume import agree_on_checkpoint
from elasticflow_airflow.runtime.protocol import Membership, ReportKind, heartbeats_path
from elasticflow_airflow.runtime.reporting import Speedometer
from elasticflow_airflow.runtime.samples.sample_order import ElasticLoader, mix_seed
from elasticflow_airflow.runtime.samples.streams import PART, StreamBook
from elasticflow_airflow.runtime.stepping.devices import (
    choose_threads,
    make_repeatable,
    pick_device,
    what_may_not_repeat,
)
from elasticflow_airflow.runtime.stepping.gradient_step import GradientStep, Sums
from elasticflow_airflow.runtime.stepping.loss_target import LossTrack, Outlook
from elasticflow_airflow.runtime.stepping.measuring import Meter, NormSchedule
from elasticflow_airflow.runtime.stepping.reduction import broadcast_model
from elasticflow_airflow.runtime.stepping.running_statistics import batch_norms, refuse_single_values
from elasticflow_airflow.runtime.stores.disk_space import lack_of_room, refuse_full_disk
from elasticflow_airflow.runtime.stores.manifest import CandidateInfo, CheckpointError, remove_leftovers
from elasticflow_airflow.runtime.stores.store import Part, is_remote

SHARD_ABOVE_GB = 4.0
"""Default size above which a state is written in parts, one per worker; the script may override it."""
_GROUP_ENDS_S = 5.0


class Leaving(SystemExit):
    """Ends the script with status 0 at the session's request; ``except Exception`` does not catch it."""

    def __init__(self) -> None:
        super().__init__(0)


class NonFiniteLoss(FloatingPointError):  # noqa: N818  (part of the public API, named after the condition)
    """The loss or a weight is NaN or infinite: further training would be worthless."""


def _overruled(context: Context, **said: object) -> list[str]:
    """Return a warning for each setting of the script that differs from the submitted one, which takes precedence."""
    if not context.submitted:
        return []
    submitted = {name: getattr(context.config, name) for name in said}
    return [
        f"{name}={said[name]} of the script does not count: {name}={counts} was submitted, or follows from what was"
        for name, counts in submitted.items()
        if said[name] is not None and counts is not None and said[name] != counts
    ]


class SessionCore:
    """State of one worker's training run, with its reports and checkpoints."""

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
        logical_workers: int | None = None,
        max_workers: int | None = None,
        threads: int | None = None,
        consistency: str | None = None,
        seed: int | None = None,
        mixed_with: int | None = None,
        target_loss: float | None = None,
        shard_checkpoints_above_gb: float | None = None,
    ) -> None:
        if seed is not None and not 0 <= seed <= bounds.MOST_COUNT:
            raise ValueError(f"seed={seed}: it is from 0 to {bounds.MOST_COUNT}")
        for name, count in {"threads": threads, "max_workers": max_workers}.items():
            if count is not None and count < 1:
                raise ValueError(f"{name}={count}: it is 1 or more")
        if None not in (logical_workers, max_workers) and logical_workers < max_workers:  # type: ignore[operator]
            raise ValueError(
                f"max_workers={max_workers} beside logical_workers={logical_workers}: some would have nothing to do;"
                " leave one of the two out"
            )
        if shard_checkpoints_above_gb is not None and not shard_checkpoints_above_gb >= 0:
            raise ValueError(f"shard_checkpoints_above_gb={shard_checkpoints_above_gb}: it is 0 or more")
        config = context.config
        if not context.submitted:
            config = replace(config, logical_workers=logical_workers, consistency=consistency or config.consistency)
        decides = context.managed and config.script_decides and (logical_workers or max_workers) is not None
        if decides:
            config = replace(config, logical_workers=logical_workers)
        if config.consistency not in ("consistent", "fast"):
            raise ValueError(f"consistency={config.consistency!r}: it is 'consistent' or 'fast'")
        if config.steps is None and config.epochs is None:
            config = replace(config, steps=steps, epochs=epochs)
        if config.micro_batch_size is None:
            config = replace(config, micro_batch_size=micro_batch_size)
        if config.target_loss is None:
            config = replace(config, target_loss=target_loss)
        if config.init_from is None and init_from is not None:
            config = replace(config, init_from=str(init_from))
        if checkpoint_interval_s is not None and not context.managed:
            config = replace(config, checkpoint_interval_s=checkpoint_interval_s)
        self.config = config
        self._overruled = _overruled(
            context,
            logical_workers=None if decides else logical_workers,
            threads=threads,
            consistency=consistency,
            seed=seed,
        )
        self.max_workers = max_workers if decides or not context.submitted else None
        self.device = pick_device()
        self.context = context
        self.allow_nonfinite_loss = allow_nonfinite_loss
        self.is_consistent = config.consistency == "consistent"
        if self.is_consistent:
            make_repeatable(self.device)
            shell = None if context.managed else os.environ
            chosen = choose_threads(self.device, config.threads, threads, environ=shell)
            if chosen is not None:
                torch.set_num_threads(chosen)
        self.lone_group = WorkerGroup()
        self.member = self._find_member()
        if self.member is None:
            size = int(os.environ.get("WORLD_SIZE", "1"))
            self.lone_group = WorkerGroup.of_torchrun(self.device, int(os.environ.get("RANK", "0")), size)
        self._shards_above_bytes = self._find_least_to_shard(shard_checkpoints_above_gb)
        self._state_bytes, self._measured = 0, False
        self._disbanded = False
        self.rehearsals = 0
        self.just_joined = False
        self.committed: Sums | None = None
        self.logical: int | None = None
        self.gradient_step: GradientStep | None = None
        self.seed = config.seed if config.seed is not None else seed or 0
        """Seed of all randomness in the training: the submitted one, else the script's, else 0."""
        self.mixed_seed = self.seed if mixed_with is None else mix_seed(self.seed, mixed_with)
        torch.manual_seed(mix_seed(self.mixed_seed, 0x1717))
        self.terminated = False
        self._pid = os.getpid()
        self.previous_handler = signal.signal(signal.SIGTERM, self.on_sigterm)
        self.registered: Registered | None = None
        self.loader: ElasticLoader | None = None
        self.book = StreamBook(self.position)
        self.has_stream = False
        self.order = 0
        """Fingerprint of a stream's first samples, or of the lengths; it must be the same on every worker."""
        self.script_epochs: int | None = None
        self.step = 0
        self.knows_size = False
        self.has_batch_norm = False
        self.started = self.leaving = self.saving = self.finished = False
        self.parts = 0, 0
        self.resumed_from: CandidateInfo | None = None
        self._initialised_from: str | None = None
        self.loss: float | None = None
        self.track = LossTrack(config.target_loss)
        self._outlook = Outlook(self.track)
        self.scalars: dict[str, float] = {}
        self.saver = Saver(
            context.checkpoints,
            incarnation=config.incarnation,
            promotes=not context.managed,
            keep=config.keep_checkpoints,
            interval=SaveInterval(failures=config.failures)
            if config.checkpoint_interval_s is None
            else config.checkpoint_interval_s,
        )
        self.speedometer = Speedometer(lambda: context.reporter.interval_s)
        self.meter, self.norms, self.measures = Meter(self.device), NormSchedule(), False
        bootstrap.session_initialised = True
        atexit.register(self.at_exit)

    def _find_member(self) -> GroupMember | None:
        """Return this worker as a member of the plan; None if there is no plan: alone, or under a bare torchrun."""
        if not self.context.managed:
            return None
        plan = Membership.read(Path(self.config.incarnation_dir))
        if plan is None:
            return None
        member = GroupMember(Path(self.config.incarnation_dir), self.context.worker_id, self.device, plan)
        if plan.rank_of(self.context.worker_id) is None:
            raise Leaving
        try:
            member.begin()
        except Dismissed:
            member.close()
            raise Leaving from None
        return member

    def _find_least_to_shard(self, said_gb: float | None) -> float:
        """Return the state size in bytes above which it is written in parts; infinity disables parts."""
        if not self.is_consistent:
            return math.inf  # In fast mode the workers' states may differ in the last bits.
        if said_gb is not None:
            return said_gb * 1e9
        here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "1")
        # The machines of a bare torchrun might not share a folder, which would only show when the training resumes.
        is_shared = self.context.managed or here or _is_network_url(self.context.checkpoints)
        return SHARD_ABOVE_GB * 1e9 if is_shared else math.inf

    @property
    def group(self) -> WorkerGroup:
        """Current group of workers that train together."""
        return self.lone_group if self.member is None else self.member.group

    @property
    def is_rehearsing(self) -> bool:
        """Whether this worker is only warming up before it joins a running training; its steps do not count."""
        return self.member is not None and not self.member.joined

    @property
    def rank(self) -> int:
        """Current rank of this worker; it may change at a step boundary. It is fixed after ``finish``."""
        return self.group.rank if self.member is None else self.member.rank

    @property
    def world_size(self) -> int:
        """Current number of workers; it may change at a step boundary."""
        return self.group.size if self.member is None else self.member.size

    @property
    def logical_workers(self) -> int:
        """Number of shares of each global batch; a share belongs to one worker at a time. See ``init``."""
        if self.logical is None:
            raise ValueError("the number of logical workers is known once session.dataloader() was called")
        return self.logical if self.is_consistent else self.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints and saves; always False while a joining worker warms up."""
        return self.rank == 0 and not self.is_rehearsing

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 0."""
        return self.position()[0]

    def on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        """Record that this worker must exit at the next step boundary."""
        if os.getpid() != self._pid:
            # This is a process that the script forked: it has no step boundary at which to exit.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.terminated = True

    def position(self) -> tuple[int, int]:
        """Return the epoch of the next step and its index within that epoch, both from 0."""
        per_epoch = self.loader.plan.steps_per_epoch if self.loader else max(1, self.step + 1)
        return divmod(self.step, per_epoch)

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step, from 0."""
        return 0 if self.loader is None else step // self.loader.plan.steps_per_epoch

    def total_or_none(self) -> int | None:
        """Return the length of the training in steps; None while it is unknown."""
        if self.config.steps is not None:
            return self.config.steps
        epochs = self.config.epochs or self.script_epochs
        if epochs is None or self.loader is None:
            return None
        return epochs * self.loader.plan.steps_per_epoch

    def all_done(self) -> bool:
        """Return whether the training is complete."""
        total = self.total_or_none()
        return self.track.reached or (total is not None and self.step >= total)

    def register_stream(self) -> None:
        """Add the stream's position to checkpoints and handovers, once both stream and registered parts exist."""
        if self.registered is not None and self.has_stream:
            # It must be the last part: a joining worker's tensors are matched by index.
            self.registered.others = {**self.registered.others, PART: self.book}

    def restore(self, registered: Registered) -> None:
        """Load the checkpoint to resume from, else the initial weights; afterwards all workers have the same state."""
        checkpoints, incarnation = self.context.checkpoints, self.config.incarnation
        known = self.config.promoted
        with agree_on_checkpoint(self.group, checkpoints, incarnation, self.warn, known) as found:
            if found is not None:
                checkpoint.load(
                    registered,
                    found,
                    logical_workers=self.config.logical_workers if self.is_consistent else None,
                    optional={PART: self.book},
                )
                self.step, self.resumed_from, self.loss = found.step, found, found.metadata.get("loss")
                self.track.restore(found.metadata.get("loss_track"))
                trained = found.metadata.get("trained") or {}
                if self.context.managed and trained.get("incarnation") == incarnation:
                    self.saver.carry_on(trained["seconds"])
                bootstrap.current_step = self.step
                return
        if self.config.init_from is not None:
            checkpoint.load_weights(registered.model, self.config.init_from)
            self._initialised_from = self.config.init_from
        broadcast_model(registered.model, self.group)

    def start(self) -> None:
        """Check what is registered, and report that training begins; later calls do nothing."""
        if self.started:
            return
        self.started = True
        samples = self.loader.plan.samples if self.loader else None
        total = self.total_or_none()
        if total is None and self.config.target_loss is None:
            # There is no default, not even one epoch: the script's own loop could have another length.
            raise ValueError(
                "nobody has said how long to train, and a loop of the script's own does not tell. Loop over"
                " session.epochs(n), say steps=, epochs= or target_loss= where the session is made, or submit the"
                " training with steps= or epochs="
            )
        if self.is_rehearsing:
            self.step = self._guess_step()
            return
        self._check_same_data()
        for sentence in self._overruled:
            self.warn(sentence)
        self._look_for_single_samples()
        for sentence in what_may_not_repeat(self.device) if self.is_consistent else ():
            self.warn(sentence)
        self.look_for_room(self.registered, steps=0)
        self.say_started(
            resumed_from=None if self.resumed_from is None else self.resumed_from.name,
            init_from=self._initialised_from,
            samples=samples,
            steps=total,
        )
        self.speedometer.leave_out()
        self.meter.begin()
        self.saver.restart_clock()

    def look_for_room(self, registered: Registered | None, *, steps: int) -> None:
        """Detect a full disk early, as far as sizes are known: before the first step optimizers have no state yet."""
        checkpoints = self.context.checkpoints
        if not self.is_main or registered is None or not isinstance(checkpoints, Path):
            return
        remove_leftovers(checkpoints, self.context.generation)  # of killed writers; nothing is being written yet
        try:
            if steps == 0:
                model = checkpoint.contents_of(Registered(registered.model))
                there = 0 if self.resumed_from is None else self.resumed_from.size_bytes
                refuse_full_disk(checkpoints, max(size_of(model), there))
                return
            size_bytes = size_of(checkpoint.contents_of(registered))
            refuse_full_disk(checkpoints, size_bytes)
        except CheckpointError as error:
            self.say(ReportKind.FAILED, message=str(error), kind="checkpoint_not_written")
            raise
        lacking = lack_of_room(checkpoints, size_bytes, self.config.keep_checkpoints)
        if lacking is not None:
            self.warn(lacking)

    def _check_same_data(self) -> None:
        if self.resumed_from is None or self.loader is None:
            return
        same_batch = self.resumed_from.metadata.get("global_batch_size") == self.loader.plan.global_batch_size
        try:
            # With another global batch size, which is warned about below, it is a different training anyway.
            checkpoint.refuse_other_size(self.resumed_from, self.logical if self.is_consistent and same_batch else None)
        except CheckpointError as error:
            self.say(ReportKind.FAILED, message=str(error), kind="bad_checkpoint")
            raise
        changes = self.loader.plan.changes_since(self.resumed_from.metadata)
        if changes:
            self.warn(
                f"the checkpoint was written with other data settings ({changes}): training goes on at step "
                f"{self.step}, but samples of this epoch may be used twice or not at all"
            )

    def _look_for_single_samples(self) -> None:
        """Warn about BatchNorm over a single sample: torch refuses it, or its statistics are worthless."""
        if self.registered is None or self.loader is None:
            return
        plan, micro = self.loader.plan, self.config.micro_batch_size
        if not self.has_batch_norm or (plan.smallest_batch > 1 and micro != 1):
            return
        if plan.smallest_batch == 1:
            why = (
                f"the last batch of an epoch has a single sample ({plan.samples} samples in batches of "
                f"{plan.global_batch_size}): choose another global batch size, or drop_last=True"
            )
        else:
            why = "micro_batch_size=1: choose 2 or more"
        refuse_single_values(batch_norms(self.registered.model), f"BatchNorm cannot be trained on one sample; {why}")
        self.warn(f"BatchNorm sees single samples: {why}")

    def say_started(self, **data: Any) -> None:
        """Report that this worker trains, at the start or as a member of a changed group."""
        micro = self.config.micro_batch_size
        if micro is None and self.loader is not None:
            micro = -(-self.loader.plan.global_batch_size // self.logical_workers)
        logical = self.logical if self.is_consistent else None
        in_place = self.member is not None
        sizes = {"micro_batch_size": micro, "logical_workers": logical}
        threads = torch.get_num_threads()
        self.say(ReportKind.STARTED, **sizes, seed=self.seed, threads=threads, in_place=in_place, **data)

    def disband(self) -> None:
        """Close the group, the data loader and the checkpoint writer. Idempotent."""
        if self.loader is not None:
            self.loader.close()
        if self._disbanded:
            return
        self._disbanded = True
        self.saver.close()
        if self.member is not None:
            # A thread blocked in an operation with a dead worker would abort an interpreter that exits normally.
            bootstrap.leave_abruptly = not self.member.close()
        else:
            self.lone_group.close()
            # An interpreter that exits while the thread still destroys the group would abort; on a busy machine that
            # takes seconds. Torchrun ends a worker that is blocked in an operation with a dead one.
            bootstrap.leave_abruptly = not self.lone_group.join(_GROUP_ENDS_S)
            if dist.is_initialized():
                dist.destroy_process_group()

    def _guess_step(self) -> int:
        """Estimate the others' step from their heartbeats: a warm-up in the right epoch avoids a second one."""
        steps = [0]
        for path in heartbeats_path(Path(self.config.incarnation_dir)).glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                steps.append(int(json.loads(path.read_text())["step"]))
        return max(steps)

    def diverged(self, what: str) -> NoReturn:
        """Report that the training has diverged, and raise NonFiniteLoss."""
        message = (
            f"{what}: nothing after it would be worth keeping. Lower the learning rate, clip gradients or look at the "
            "batch; checkpoints from before stay valid."
        )
        self.say(ReportKind.FAILED, message=message, kind="nan_loss")
        raise NonFiniteLoss(message)

    def shards(self) -> bool:
        """Return whether the state is written in parts, one per worker; False until its size has been measured."""
        return self.world_size > 1 and self._state_bytes > self._shards_above_bytes

    def measure_state(self, registered: Registered) -> None:
        """Measure the size of a checkpoint, to decide whether to write it in parts."""
        may_split = self._shards_above_bytes < math.inf and self.saver.can_write_parts
        if self.world_size > 1 and not self._measured and may_split:
            self._measured = True
            with contextlib.suppress(CheckpointError):  # It is reported when the state is saved.
                self._state_bytes = size_of(checkpoint.contents_of(registered))

    def part(self, token: int) -> Part:
        """Return this worker's part of the save identified by ``token``."""
        return Part(rank=self.rank, size=self.world_size, token=f"{token:012x}", sweeps=True)

    def save(
        self, *, wait: bool, whoever: bool = False, part: Part | None = None, generation: int | None = None
    ) -> str | None:
        """Save a checkpoint (rank 0 only; every worker has the same state); return its name if ``wait`` is set.

        Without ``wait`` only a copy is made now; a later step boundary reports when it is on disk. With ``whoever`` any
        rank saves. With ``part`` all workers call this, and each saves its part for the ``generation`` that rank 0
        has sent. Raises CheckpointError if it cannot be written, NonFiniteLoss if a weight is not finite.
        """
        self.saver.restart_clock()
        self._measured = False  # The state may have grown.
        if not (self.is_main or whoever or part is not None) or self.registered is None:
            return None
        if wait:
            # A survivor (whoever) does not wait: the other workers' parts may never be written.
            self.tell_saved(lambda: self.saver.end_parts(0.0 if whoever else PARTS_LIMIT_S))
        if not self.allow_nonfinite_loss and not _all_finite(self.registered.model):
            # The loss may be finite while the gradients are not. Without this check the checkpoint would be unusable.
            self.diverged(f"the model has weights that are no numbers after step {self.step}")
        registered = self.registered
        epoch, step_in_epoch = self.position()
        metadata = {
            "epoch": epoch,
            "step_in_epoch": step_in_epoch,
            "loss": finite_or_none(self.loss),
            "loss_track": self.track.state(),
            "trained": {"incarnation": self.config.incarnation, "seconds": self.saver.trained_s},
            "logical_workers": self.logical if self.is_consistent else None,
            **(self.loader.plan.metadata if self.loader else {}),
        }

        def save() -> list[Saved]:
            saved = self.saver.save(
                registered,
                generation=self.context.generation if generation is None else generation,
                step=self.step,
                metadata=metadata,
                wait=wait,
                part=part,
            )
            return [] if saved is None else [saved]

        saved = self.tell_saved(save)
        return saved[0].name if saved else None

    def tell_saved(self, done: Callable[[], list[Saved]]) -> list[Saved]:
        """Report the checkpoints that ``done`` returns as written. Reports a failure and raises CheckpointError."""
        try:
            saved = done()
        except CheckpointError as error:
            self.say(ReportKind.FAILED, message=str(error), kind="checkpoint_not_written")
            raise
        for warning in self.saver.take_warnings():
            self.warn(warning)
        for one in saved:
            if one.digest is None:
                continue  # This is a part; rank 0 reports the complete checkpoint.
            self.context.reporter.say(
                ReportKind.CHECKPOINT,
                self.rank,
                one.step,
                path=one.name,
                digest=one.digest,
                size_bytes=one.size_bytes,
                write_s=one.write_s,
                stall_s=one.stall_s,
            )
        return saved

    def say_progress(self) -> None:
        """Report progress since the last report, if any steps were done."""
        steps, seconds = self.speedometer.take()
        if not steps:
            return
        own = {"window_steps": steps, "window_s": seconds, "epoch": self.epoch}
        data: dict[str, Any] = (
            own | {"loss": self.loss} | self.scalars | own | self._measurements(seconds) | self._outlook_of_target()
        )
        if self.allow_nonfinite_loss:
            # The service would end the training because of it.
            data["loss"] = finite_or_none(data["loss"])
        self.say_if_main(ReportKind.PROGRESS, **data)

    def _measurements(self, seconds: float) -> dict[str, Any]:
        found: dict[str, Any] = self.meter.progress()
        found["samples_per_s"] = found["samples"] / seconds if seconds > 0 else None
        found["noise_scale"] = None if self.gradient_step is None else self.gradient_step.noise.value
        return found

    def _outlook_of_target(self) -> dict[str, Any]:
        found = self._outlook.look() if self.is_main else {}
        total = self.total_or_none()
        if total is not None and "steps_left" in found:
            found["steps_left"] = min(found["steps_left"], total - self.step)
        return found

    def say_worker(self) -> None:
        """Report this worker's own measurements; every rank does so."""
        found = self.meter.worker()
        if found is not None:
            self.say(ReportKind.WORKER, **found)

    def at_exit(self) -> None:
        """Report the last steps of an unfinished training at process exit, and close everything."""
        if os.getpid() != self._pid:
            return
        is_under_way = self.started and not self.finished and not self.is_rehearsing
        if is_under_way and not self._disbanded:
            with contextlib.suppress(CheckpointError):  # It has been reported.
                self.tell_saved(self.saver.flush)
        failed = getattr(sys, "last_value", None) is not None
        if is_under_way and self.all_done() and not self.context.managed and not failed:
            self.warn("all steps are done, and the script ends without session.finish(), which saves the result")
        if self.context.managed and is_under_way and Path(self.config.incarnation_dir).is_dir():
            self.say_progress()
        self.disband()

    def warn(self, message: str) -> None:
        """Report a warning for the user; only rank 0 does, so it appears once."""
        self.say_if_main(ReportKind.WARNING, message=message)

    def say(self, what: ReportKind, /, **data: Any) -> None:
        """Write a report of this worker."""
        self.context.reporter.say(what, self.rank, self.step, **data)

    def say_if_main(self, what: ReportKind, /, **data: Any) -> None:
        """Write a report about the whole training; only rank 0 does."""
        if self.is_main:
            self.say(what, **data)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _is_network_url(where: str | Path) -> bool:
    return is_remote(where) and not str(where).startswith(("file://", "local://"))


def _all_finite(model: nn.Module) -> bool:
    """Return whether all weights are finite. Eight times faster than ``isfinite().all()``, which allocates a mask."""
    weights = [p.detach() for p in model.parameters() if p.is_floating_point() and p.numel()]
    extremes = [extreme.isfinite() for weight in weights for extreme in torch.aminmax(weight)]
    # Read one value from the device, not one per weight: each read makes the host wait.
    return not extremes or bool(torch.stack(extremes).all())


def finite_or_none(value: float | None) -> float | None:
    """Return the value if it is finite, so that JSON can hold it, else None."""
    return value if value is not None and math.isfinite(value) else None

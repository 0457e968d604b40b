"""The submission of a job: which task trains what, how long, and by when."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from elasticflow_airflow import bounds
from elasticflow_airflow.api.base import Wire
from elasticflow_airflow.api.fields import (
    Argument,
    CurveSize,
    DurationS,
    LongText,
    Loss,
    MapIndex,
    Name,
    PathText,
    Requirement,
    SampleCount,
    SecretValue,
    Seed,
    Speed,
    StepCount,
    Switch,
    UtcSeconds,
    Value,
    WorkerCount,
    refuse,
)

OnReject = Literal["fail", "best_effort", "wait", "renegotiate", "late"]
OnMiss = Literal["finish", "fail", "use_last_checkpoint"]
Consistency = Literal["consistent", "fast"]


class JobIdentity(Wire):
    """The Airflow task instance that a job belongs to. The namespace distinguishes several Airflows."""

    namespace: Name = "default"
    dag_id: Name
    run_id: Name
    task_id: Name
    map_index: MapIndex = -1

    @model_validator(mode="after")
    def _short_enough(self) -> JobIdentity:
        refuse(bounds.key_problem(self.namespace, self.dag_id, self.task_id))
        return self

    @classmethod
    def as_stored(cls, raw: object) -> Self:
        """Read a stored identity. Takes what it can from a damaged row, so that this row does not hide the others."""
        parts = {"namespace": "default", **raw} if isinstance(raw, Mapping) else {}
        names: dict[str, Any] = {
            name: str(parts.get(name, "")) for name in ("namespace", "dag_id", "run_id", "task_id")
        }
        map_index = parts.get("map_index")
        names["map_index"] = map_index if isinstance(map_index, int) else -1
        return cast("Self", cls.model_construct(**names))

    @property
    def job_id(self) -> str:
        """Deterministic id: readable, safe in a URL and as a folder name, made unique by a digest of all parts."""
        parts = [self.namespace, self.dag_id, self.run_id, self.task_id, self.map_index]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        readable = re.sub(r"[^a-z0-9]+", "-", f"{self.dag_id}-{self.task_id}".lower()).strip("-")[:60]
        return f"{readable or 'job'}-{digest}"

    @property
    def recurring_key(self) -> str:
        """Key under which history (scaling curve, costs) is kept; the same for every run of this task."""
        return json.dumps([self.namespace, self.dag_id, self.task_id, self.map_index])


def owner_of(recurring_key: str) -> tuple[str, str]:
    """Return the namespace and the DAG id of a task."""
    return task_of(recurring_key)[:2]


def task_of(recurring_key: str) -> tuple[str, str, str]:
    """Return namespace, DAG id and task id of a task, without the index of a mapped instance."""
    namespace, dag_id, task_id, _ = json.loads(recurring_key)
    return str(namespace), str(dag_id), str(task_id)


def name_of(recurring_key: str) -> str:
    """Return the readable name of a task."""
    _, dag_id, task_id, map_index = json.loads(recurring_key)
    return f"{dag_id}.{task_id}" + (f"[{map_index}]" if map_index >= 0 else "")


class Command(Wire):
    """What a worker runs: ``script`` is a path inside the snapshot, or ``module`` is imported from it."""

    snapshot: str = Field(pattern=r"^[0-9a-f]{64}$")
    script: PathText | None = None
    module: PathText | None = None
    args: tuple[Argument, ...] = Field(default=(), max_length=bounds.MOST_ARGUMENTS)
    args_shown: tuple[Argument, ...] | None = Field(default=None, max_length=bounds.MOST_ARGUMENTS)
    """``args`` for display, with ``***`` in place of secrets; None: the submitter knows of no secret in them."""
    python: PathText | None = None
    requirements: tuple[Requirement, ...] = Field(default=(), max_length=bounds.MOST_REQUIREMENTS)
    """Packages that are installed beside those of ``python``, in an environment of their own, before it gets slots."""
    working_dir: PathText | None = None
    env: dict[Argument, Argument] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_entry(self) -> Command:
        if (self.script is None) == (self.module is None):
            raise ValueError("give exactly one of script= and module=")
        if self.args_shown is not None and len(self.args_shown) != len(self.args):
            raise ValueError(f"args_shown= has {len(self.args_shown)} elements, and args= has {len(self.args)}")
        return self


class Length(Wire):
    """How much to train: ``steps``, or ``epochs`` (of ``samples`` each, if the submitter knows).

    With neither, the script determines the length; a script that does not fails.
    """

    steps: StepCount | None = None
    epochs: StepCount | None = None
    samples: SampleCount | None = None

    @model_validator(mode="after")
    def _not_both(self) -> Length:
        if self.steps is not None and (self.epochs is not None or self.samples is not None):
            raise ValueError("give steps, or epochs and samples, not both")
        if self.samples is not None and self.epochs is None:
            raise ValueError("samples= needs epochs=")
        return self

    def total_steps(self, global_batch_size: int) -> int | None:
        """Return the total number of optimizer steps, or None if unknown. The last batch of an epoch may be short."""
        if self.steps is not None:
            return self.steps
        if self.epochs is not None and self.samples is not None:
            return self.epochs * -(-self.samples // global_batch_size)
        return None


class JobSubmission(Wire):
    """The full specification of a job. ``secret_env`` is never echoed, stored in plain text or logged."""

    identity: JobIdentity
    command: Command
    length: Length
    global_batch_size: StepCount
    deadline_at: UtcSeconds | None = None
    best_effort: Switch = False
    value: Value = 1.0
    on_reject: OnReject = "fail"
    latest_deadline_at: UtcSeconds | None = None
    on_miss: OnMiss = "finish"
    on_past_deadline: Literal["on_miss", "fail", "best_effort"] = "on_miss"
    """What to do if the deadline has passed before the job is admitted: "on_miss" rejects the job, unless it continues
    an incarnation that was admitted and missed the deadline."""
    init_from: PathText | None = None
    min_workers: WorkerCount = 1
    max_workers: WorkerCount | None = None
    consistency: Consistency = "consistent"
    logical_workers: WorkerCount | None = None
    """Fixed number of shares that each step is split into, whatever the number of workers; None: eight, or the largest
    power of two below that divides the global batch; more if ``max_workers`` is."""
    seed: Seed | None = None
    """Random seed of the training; None: the script's seed, or 0 if it sets none."""
    scaling_curve: dict[CurveSize, Speed] | None = None
    progress_regex: LongText | None = None
    progress_file: PathText | None = None
    target_loss: Loss | None = None
    """Training ends when its smoothed loss reaches this value, and after its length at the latest."""
    secret_env: dict[Argument, SecretValue] = Field(default_factory=dict)
    lease_s: DurationS = 600.0
    orphan_s: DurationS = 3600.0
    due_at: UtcSeconds | None = None
    """When this run was due by its timetable; default: what the previous run announced, or the time of submission."""
    next_run_at: UtcSeconds | None = None
    """When the next run of the same task is due: slots are kept free for it, based on its past runs."""
    next_runs_at: tuple[UtcSeconds, ...] = Field(default=(), max_length=200)
    """Further due times, as far as the timetable provides them; those of the next two days are enough."""
    labels: dict[Name, LongText] = Field(default_factory=dict, max_length=bounds.MOST_LABELS)

    @model_validator(mode="after")
    def _within_bounds(self) -> JobSubmission:
        """Check limits across fields: total steps of the epochs, and total size of command and environment."""
        if self.length.epochs is not None and self.length.samples is not None:
            refuse(bounds.total_steps_problem(self.length.epochs, self.length.samples, self.global_batch_size))
        secrets = {name: value.get_secret_value() for name, value in self.secret_env.items()}
        refuse(bounds.environment_problem("env", self.command.env))
        refuse(bounds.environment_problem("secret_env", secrets))
        refuse(bounds.command_problem(self.command.args, {**self.command.env, **secrets}))
        return self

    @model_validator(mode="after")
    def _consistent(self) -> JobSubmission:
        if self.best_effort == (self.deadline_at is not None):
            raise ValueError("give a deadline or best_effort=True, and not both")
        for size, speed in (self.scaling_curve or {}).items():
            if size < 1 or size & (size - 1) or not 0.0 < speed < math.inf:
                raise ValueError("scaling_curve= gives positive steps/s by number of workers, each a power of two")
        if self.on_reject in ("renegotiate", "late") and self.latest_deadline_at is None:
            raise ValueError(f'on_reject="{self.on_reject}" needs latest_deadline')
        if (self.latest_deadline_at or math.inf) <= (self.deadline_at or -math.inf):
            raise ValueError("latest_deadline is not later than the deadline: nothing could be accepted in its place")
        for name, workers in (("min_workers", self.min_workers), ("max_workers", self.max_workers)):
            if workers is not None and workers & (workers - 1):
                raise ValueError(f"{name}={workers} is not a power of two")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(
                f"max_workers={self.max_workers} is less than min_workers={self.min_workers}: give at least"
                f" {self.min_workers}, or leave max_workers out"
            )
        wrong = None if self.progress_regex is None else bounds.pattern_problem(self.progress_regex)
        if wrong is not None:
            raise ValueError(f"progress_regex {wrong}")
        problem = target_problem(
            self.target_loss,
            bounded=self.length.steps is not None or self.length.epochs is not None,
            plain=self.progress_regex is not None or self.progress_file is not None,
        )
        if problem is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _divisible(self) -> JobSubmission:
        problem = share_problem(
            self.consistency, self.logical_workers, self.global_batch_size, self.min_workers, self.max_workers
        )
        if problem is not None:
            raise ValueError(problem)
        return self

    def equality_key(self) -> str:
        """Return a digest of what makes two submissions the same training.

        Covers script, arguments, length, target, batch, init and seed.
        """
        length = self.length.model_dump()
        if self.length.steps is None and self.length.epochs is None:
            length["epochs"] = 1  # as older clients sent it, so that a job that they submitted is found again
        same: list[object] = [
            self.command.script,
            self.command.module,
            list(self.command.args),
            length,
            self.global_batch_size,
            self.init_from,
        ]
        if self.target_loss is not None:  # Without a target the digest stays the same as before targets were added.
            same.append(self.target_loss)
        if self.seed is not None:
            same.append({"seed": self.seed})
        return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()


def target_problem(target_loss: float | None, *, bounded: bool, plain: bool) -> str | None:
    """Return what is wrong with a target loss and how to fix it, or None.

    ``bounded``: ``steps`` or ``epochs`` is given. ``plain``: progress is parsed from the script's output or file, so
    the script does not use the session.
    """
    if target_loss is None:
        return None
    if not bounded:
        return (
            f"target_loss={target_loss:g} needs steps= or epochs= as well: the most that it may train, on which its"
            " deadline is promised"
        )
    if plain:
        return (
            f"target_loss={target_loss:g} beside progress_regex= or progress_file=: only a script that uses the"
            " session (runtime.init(), the Trainer, Lightning) can be ended by its loss"
        )
    return None


def largest_share(global_batch_size: int, at_most: int) -> int:
    """Return the largest power of two that divides the global batch and is at most ``at_most``; at least 1."""
    divides = global_batch_size & -global_batch_size
    return min(divides, 1 << (max(1, at_most).bit_length() - 1))


def share_problem(
    consistency: str, logical_workers: int | None, global_batch_size: int, min_workers: int, max_workers: int | None
) -> str | None:
    """Return what is wrong with the split of a step into shares and how to fix it, or None.

    In consistent mode every step is split into ``logical_workers`` equal shares, a power of two, and each worker
    computes one or more of them, so there cannot be more workers than shares. In fast mode each worker takes a part of
    the batch.
    """
    for name, workers in (("min_workers", min_workers), ("max_workers", max_workers)):
        if workers is not None and workers > global_batch_size:
            return f"{name}={workers} is more than global_batch_size={global_batch_size}: some would have no sample"
    if consistency == "fast":
        if logical_workers is not None:
            return (
                f'logical_workers={logical_workers} beside consistency="fast", where there are none: leave one of the'
                " two out"
            )
        return None
    shares = largest_share(global_batch_size, global_batch_size)
    if logical_workers is None:
        if min_workers > shares:
            return (
                f"min_workers={min_workers} workers cannot share global_batch_size={global_batch_size} equally: choose"
                f' a multiple of {min_workers}, at most {shares} workers, or consistency="fast"'
            )
        return None
    if logical_workers & (logical_workers - 1):
        return f"logical_workers={logical_workers} is not a power of two"
    if global_batch_size % logical_workers:
        return (
            f"logical_workers={logical_workers} does not divide global_batch_size={global_batch_size}: choose a"
            f" multiple of {logical_workers}, or logical_workers={largest_share(global_batch_size, logical_workers)}"
        )
    for name, workers in (("min_workers", min_workers), ("max_workers", max_workers)):
        if workers is not None and workers > logical_workers:
            return (
                f"{name}={workers} is more than logical_workers={logical_workers}: some would have nothing to do;"
                f" give at least {workers} logical workers"
            )
    return None

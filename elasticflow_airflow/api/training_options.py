"""The options of a training: a single list from which everything that accepts or describes an option is derived.

Derived from it are the operator's template fields, the checks at DAG parse (``arguments``), the arguments that a
decorated function may return, the defaults of mapped tasks, the flags of ``elasticflow submit``
(``cli.training_flags``), the fields of a submission (``on_wire``) and, by ``make reference``, the operator's docstring
and its page, which use the text below each option (Markdown; links only on the page).

To add an option, add it here, to the signature of ``ElasticTrainOperator`` and, if the service needs it, to
``JobSubmission``; then run ``make reference``. ``tests/airflow/test_training_options.py`` reports what was forgotten.
May import neither Airflow nor Typer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, auto
from typing import Any, Final, Literal, get_args

from elasticflow_airflow.api import Consistency, OnMiss, OnReject

MOMENT_FORMS: Final = (
    "07:30 (the next one, this machine's time), +2h30m, or 2026-01-31T07:30 (with Z or +01:00: that zone)"
)
"""The accepted formats of a time on a command line."""
REQUIRED: Final = ...
"""Default of an option that must be given."""


class ValueKind(Enum):
    """The kind of value that an option takes; determines its check and its parsing from a command line."""

    PATH = auto()
    TEXT = auto()
    PATTERN = auto()
    """A regular expression; braces in it are not a template."""
    CHOICE = auto()
    SWITCH = auto()
    COUNT = auto()
    POWER_OF_TWO = auto()
    SEED = auto()
    LOSS = auto()
    VALUE = auto()
    MOMENT = auto()
    DURATION = auto()
    TASK = auto()
    """The id of a downstream task, or ``"dag_run"``."""
    ARGUMENTS = auto()
    ENVIRONMENT = auto()
    SECRETS = auto()
    REQUIREMENTS = auto()
    CURVE = auto()
    CALLABLE = auto()
    CALLABLES = auto()


_TYPES: Final[Mapping[ValueKind, str]] = {
    ValueKind.SWITCH: "bool",
    ValueKind.COUNT: "int",
    ValueKind.POWER_OF_TWO: "int",
    ValueKind.SEED: "int",
    ValueKind.LOSS: "float",
    ValueKind.VALUE: "float",
    ValueKind.MOMENT: "str | time | timedelta | datetime",
    ValueKind.DURATION: "timedelta",
    ValueKind.ARGUMENTS: "Sequence[Any]",
    ValueKind.ENVIRONMENT: "Mapping[str, str]",
    ValueKind.SECRETS: "Mapping[str, str]",
    ValueKind.REQUIREMENTS: "str | Sequence[str]",
    ValueKind.CURVE: "Mapping[int, float]",
    ValueKind.CALLABLE: "Callable[..., Any] | str",
    ValueKind.CALLABLES: "Callable[..., Any] | str | Sequence[Any]",
}
"""Types as written in the operator's signature; any other kind is ``str``."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a training, under the name of the operator's argument."""

    kind: ValueKind
    default: Any = None
    name: str = field(init=False)
    choices: tuple[str, ...] = field(default=(), kw_only=True)
    template: bool = field(default=False, kw_only=True)
    """Whether the option is a template field of the operator."""
    decidable: bool = field(default=True, kw_only=True)
    """Whether a decorated function may return it. False for what Airflow must know before the function runs."""
    forecast: Literal["needed", "useful"] | None = field(default=None, kw_only=True)
    """Whether a forecast of future runs requires it ("needed"), or omits it if only a run knows it ("useful")."""
    wire: str | None = field(default=None, kw_only=True)
    """Its field in a ``JobSubmission``; None: only the Airflow side uses it."""
    flag: str | None = field(default=None, kw_only=True)
    """Its flag of ``elasticflow submit``; None: it has none."""
    help: str = field(default="", kw_only=True)
    """Help text of the flag."""
    default_means: str = field(default="", kw_only=True)
    """Description of the default on the reference page, where the value alone is not enough."""

    def __set_name__(self, _: type, name: str) -> None:
        object.__setattr__(self, "name", name)

    @property
    def annotation(self) -> str:
        """The type in the operator's signature."""
        kind = _TYPES.get(self.kind, "str")
        template = " | str" if self.template and kind in ("int", "float") else ""
        return f"{kind}{template}{' | None' if self.default is None else ''}"


class WhatToTrain:
    """The code, its arguments, and where it begins."""

    script = Option(ValueKind.PATH, template=True, forecast="needed", wire="command.script")
    """Training script, relative to the DAG file's folder (then to the bundle's root), or absolute. Give this or
    `module`."""
    module = Option(ValueKind.TEXT, template=True, forecast="needed", wire="command.module")
    """Module to run, like `package.train`. It is found on the worker's Python path, and not imported there."""
    script_args = Option(ValueKind.ARGUMENTS, (), template=True, wire="command.args")
    """List of arguments, one element each. Numbers become text. Every user of the machine can see them in the process
    list: pass secrets with `secret_env`. The page shows `***` for what Airflow masks, and for the values of options
    like `--token`."""
    env = Option(
        ValueKind.ENVIRONMENT,
        template=True,
        wire="command.env",
        flag="--env",
        help="NAME=VALUE for the script; may be repeated.",
    )
    """Environment variables. Rendered fields are shown in Airflow's UI: no secrets here."""
    secret_env = Option(
        ValueKind.SECRETS,
        wire="secret_env",
        flag="--secret-env",
        help="NAME of a variable of this shell that is passed on as a secret; may be repeated.",
    )
    """Name to `"conn:<connection id>.<field>"`; `<field>` is `password`, `login`, `host`, `schema`, `port` or
    `extra.<key>`. Read at submit, stored encrypted, erased when the job ends, never logged. Not a template field."""
    working_dir = Option(
        ValueKind.PATH,
        template=True,
        wire="command.working_dir",
        flag="--working-dir",
        help="Working directory on the service's machine.",
        default_means="the code",
    )
    """Where the script runs. Relative: from the DAG file's folder."""
    python = Option(
        ValueKind.PATH,
        template=True,
        wire="command.python",
        flag="--python",
        help="Interpreter on the service's machine; default: its own.",
        default_means="the service's",
    )
    """Interpreter. It needs torch, and nothing of this project."""
    requirements = Option(
        ValueKind.REQUIREMENTS,
        template=True,
        wire="command.requirements",
        flag="--requirements",
        help="A requirements file: packages to install in addition to the interpreter's.",
        default_means="none",
    )
    """Packages beside those of the interpreter: a list like `["accelerate==1.2.3"]`, or a requirements file (relative:
    from the DAG file's folder). They are installed by uv, once on each machine, before the training gets any slots. See
    [packages of a training](../how-to/requirements.md)."""
    init_from = Option(ValueKind.PATH, template=True, wire="init_from")
    """`"latest"`: start from the weights of this task's last success; or the folder of a checkpoint. A template that
    renders to an empty text: from scratch."""


class HowMuch:
    """The length of the training, and what a step is."""

    steps = Option(
        ValueKind.COUNT,
        template=True,
        forecast="useful",
        wire="length.steps",
        flag="--steps",
        help="How many optimizer steps to train; or --epochs.",
    )
    """Optimizer steps in all. Not beside `epochs` or `samples`."""
    epochs = Option(
        ValueKind.COUNT,
        template=True,
        forecast="useful",
        wire="length.epochs",
        flag="--epochs",
        help="How many epochs.",
    )
    """Epochs, if there are no `steps`. With neither, the script's own length counts (`session.epochs(4)`,
    `num_train_epochs=4`, `max_epochs=4`); a script that has none, but a loop of its own over the loader, ends with an
    error before its first step. With `samples` alone, one epoch."""
    samples = Option(
        ValueKind.COUNT,
        template=True,
        forecast="useful",
        wire="length.samples",
        flag="--samples",
        help="Samples of an epoch, if they are known.",
    )
    """Samples of one epoch. Without it the training must use our sampler, which reports it."""
    global_batch_size = Option(
        ValueKind.COUNT,
        REQUIRED,
        template=True,
        forecast="needed",
        wire="global_batch_size",
        flag="--batch",
        help="Samples of a step, over all workers.",
    )
    """Samples of one optimizer step, over all workers. It never changes."""
    target_loss = Option(
        ValueKind.LOSS,
        template=True,
        wire="target_loss",
        flag="--target-loss",
        help="End when the smoothed loss reaches this.",
    )
    """End the training, as a success, as soon as the smoothed loss (mean of about the last 32 steps) reaches this
    value. Give `steps` or `epochs` as well: they are the maximum length, and the promise is based on it. For scripts
    that use the session, the Trainer or Lightning. See [training to a
    loss](../how-to/deadlines.md#training-to-a-loss)."""


class ByWhen:
    """The deadline, what it is worth, and what happens where it cannot be kept."""

    deadline = Option(
        ValueKind.MOMENT,
        template=True,
        forecast="needed",
        wire="deadline_at",
        flag="--deadline",
        help=f"By when it must end: {MOMENT_FORMS}.",
    )
    """Time of day in the DAG's time zone, duration after the run is due, datetime, or text of either. See
    [how to choose a deadline](../how-to/deadlines.md)."""
    deadline_of = Option(ValueKind.TASK, decidable=False, default_means="this training")
    """Whose deadline that is: the id of a downstream task, or `"dag_run"`. Without `deadline`, the time comes from the
    DAG: its earliest `DeadlineAlert` that a worker can evaluate, else its next run. See
    [the deadline of something downstream](../how-to/deadlines.md#the-deadline-of-something-downstream)."""
    downstream_reserve = Option(ValueKind.DURATION, timedelta(minutes=5), default_means="5 min")
    """With `deadline_of`: the time to reserve between the end of training and the end of that target, until earlier
    runs have shown how long this takes."""
    best_effort = Option(
        ValueKind.SWITCH,
        False,
        wire="best_effort",
        flag="--best-effort",
        help="No deadline: trains with what others leave.",
    )
    """No deadline: train on what the others leave. A job has a deadline or is best effort."""
    value = Option(ValueKind.VALUE, 1.0, wire="value", flag="--value", help="What meeting the deadline is worth.")
    """Weight of this job against others, where not all fit; greater than 0, without a unit."""
    on_reject = Option(
        ValueKind.CHOICE,
        "fail",
        choices=get_args(OnReject),
        wire="on_reject",
        flag="--on-reject",
        help="If the deadline cannot be promised: fail, best_effort, wait, renegotiate or late.",
    )
    """When the deadline cannot be promised: `"fail"`: fail at once, without retries, and name the earliest feasible
    deadline; `"best_effort"`: train without a deadline; `"wait"`: wait for capacity; `"renegotiate"`: accept a later
    deadline, up to `latest_deadline`; `"late"`: the same, but the job's `value` falls linearly to zero until then."""
    latest_deadline = Option(
        ValueKind.MOMENT,
        template=True,
        forecast="useful",
        wire="latest_deadline_at",
        flag="--latest-deadline",
        help="With renegotiate or late: the latest acceptable deadline. With late, the value falls to zero until then.",
    )
    """Only with `on_reject="renegotiate"` or `"late"`; the same forms as `deadline`."""
    on_past_deadline = Option(
        ValueKind.CHOICE, "auto", choices=("auto", "fail", "best_effort"), wire="on_past_deadline"
    )
    """When the deadline (or `latest_deadline`, if given) has passed before the job is submitted. `"auto"`: train as
    best effort in backfills, cleared tasks and runs that began after the deadline (such as the first after unpausing),
    else fail. `"fail"`: fail. `"best_effort"`: train as best effort. For a retry of a job that was admitted already,
    `on_miss` decides, except in a backfill or after a clear."""
    on_miss = Option(ValueKind.CHOICE, "finish", choices=get_args(OnMiss), wire="on_miss")
    """When a running job misses its deadline after all. `"finish"`: it trains on, and the task succeeds late. `"fail"`:
    it stops, and the task fails. `"use_last_checkpoint"`: it stops, and the task succeeds with the last checkpoint."""


class HowItRuns:
    """The workers, what is known of the script, and who is told."""

    min_workers = Option(
        ValueKind.POWER_OF_TWO, 1, wire="min_workers", flag="--min-workers", help="Never fewer; a power of two."
    )
    """Never fewer workers than this: a power of two."""
    max_workers = Option(
        ValueKind.POWER_OF_TWO,
        wire="max_workers",
        flag="--max-workers",
        help="Never more; a power of two.",
        default_means="what fits",
    )
    """Never more: a power of two."""
    consistency = Option(
        ValueKind.CHOICE,
        "consistent",
        choices=get_args(Consistency),
        wire="consistency",
        flag="--consistency",
        help="consistent: the same weights for any number of workers; or fast.",
    )
    """The trained model does not depend on how many workers there were. `"fast"`: plain data-parallel training, whose
    result does."""
    logical_workers = Option(
        ValueKind.POWER_OF_TWO,
        wire="logical_workers",
        flag="--logical-workers",
        help="Shares that each step is split into, for any number of workers.",
        default_means="8, or `max_workers`",
    )
    """Consistent mode: into how many shares every step is cut, whatever the number of workers. A power of two that
    divides `global_batch_size`; there are never more workers. Default, on every cluster and without one: 8, or
    `max_workers` if that is more, or the largest power of two below that divides the batch. A retry that resumes keeps
    it."""
    seed = Option(
        ValueKind.SEED,
        wire="seed",
        flag="--seed",
        help="Seed of everything random; default: the script's, or 0.",
        default_means="the script's, or 0",
    )
    """Of all that is random in the training: the first weights, the order of samples, dropout."""
    scaling_curve = Option(ValueKind.CURVE, wire="scaling_curve", default_means="measured")
    """Workers to optimizer steps per second, like `{1: 2.0, 2: 3.8}`: no profiling."""
    progress_regex = Option(
        ValueKind.PATTERN,
        wire="progress_regex",
        flag="--progress-regex",
        help="For scripts without this library: a pattern that finds the step in a line of output.",
    )
    """How to read the step, and the loss, in the lines of a script that knows nothing of this library; it also needs
    `steps`. [How](../how-to/plain-torchrun-script.md#as-a-task)."""
    progress_file = Option(
        ValueKind.PATH,
        wire="progress_file",
        flag="--progress-file",
        help="The same with a file, in its working directory, that it writes its step to.",
    )
    """Or the file that such a script writes its step into."""
    on_at_risk = Option(ValueKind.CALLABLES, decidable=False)
    """Functions, notifiers or import paths, one or a list, called with Airflow's context each time the job comes to be
    at risk of missing its deadline. See [how to be told in time](../how-to/alerts.md)."""
    on_promote = Option(ValueKind.CALLABLE, decidable=False)
    """A function or import path, called after a success. Its parameters decide what it gets: `result`,
    `checkpoint_path`, and entries of Airflow's context. See [how to hand a model on](../how-to/model-registry.md)."""
    deferrable = Option(ValueKind.SWITCH, decidable=False, default_means="`[elasticflow] deferrable` (true)")
    """Wait in the triggerer. `False` blocks a worker slot. Under `dag.test()` a deferrable task is rescheduled instead,
    so that several jobs are in flight."""
    elasticflow_conn_id = Option(
        ValueKind.TEXT, "elasticflow_default", template=True, decidable=False, forecast="needed"
    )
    """Connection of the service. Where the *default* one is missing, the embedded service of this machine is used."""


GROUPS: Final = (WhatToTrain, HowMuch, ByWhen, HowItRuns)
"""The groups of options, as the reference shows them."""
OPTIONS: Final[Mapping[str, Option]] = {
    name: option for group in GROUPS for name, option in vars(group).items() if isinstance(option, Option)
}
TEMPLATE_FIELDS: Final = tuple(name for name, option in OPTIONS.items() if option.template)
FORECAST: Final = {name: option.forecast for name, option in OPTIONS.items() if option.forecast is not None}
"""The options that a forecast reads from a task before any run."""
DEFAULTS: Final[Mapping[str, Any]] = {
    name: None if option.default is REQUIRED else option.default for name, option in OPTIONS.items()
}
"""Value of each option if it is not given; None for a required one."""


def names_of(*kinds: ValueKind) -> tuple[str, ...]:
    """Return the names of the options of some kinds."""
    return tuple(name for name, option in OPTIONS.items() if option.kind in kinds)


def on_wire(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``JobSubmission`` for the given option values by name."""
    message: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if option.wire is not None and name in values:
            *group, last = option.wire.split(".")
            (message.setdefault(group[0], {}) if group else message)[last] = values[name]
    return message

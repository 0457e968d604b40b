"""The flags of ``elasticflow submit`` that describe the training, generated from ``training_options``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import typer

from elasticflow_airflow import bounds
from elasticflow_airflow.api.training_options import OPTIONS, Option, ValueKind, WhatToTrain
from elasticflow_airflow.cli.terminal.signatures import described_as

_READ_AS: Final[dict[ValueKind, Any]] = {
    ValueKind.COUNT: int,
    ValueKind.POWER_OF_TWO: int,
    ValueKind.SEED: int,
    ValueKind.LOSS: float,
    ValueKind.VALUE: float,
    ValueKind.SWITCH: bool,
    ValueKind.ENVIRONMENT: list[str],
    ValueKind.SECRETS: list[str],
}
"""Types of the flags; any other kind is ``str``."""
_LEAST: Final = {ValueKind.COUNT: 1, ValueKind.POWER_OF_TWO: 1, ValueKind.SEED: 0, ValueKind.VALUE: bounds.LEAST_VALUE}


def with_training_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with a flag for each option that has one; ``training`` receives their values by name."""
    flags = {_parameter_name(option): option for option in OPTIONS.values() if option.flag is not None}
    # Flags on how the code is run come last, so that --help begins with what every user needs.
    flags = dict(sorted(flags.items(), key=lambda flag: hasattr(WhatToTrain, flag[1].name)))

    def run(**given: Any) -> None:
        command(training={option.name: given.pop(name) for name, option in flags.items()}, **given)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        is_training = parameter.name == "training"
        parameters += [_parameter(name, one) for name, one in flags.items()] if is_training else [parameter]
    return described_as(command, run, parameters)


def _parameter_name(option: Option) -> str:
    return (option.flag or "").removeprefix("--").replace("-", "_")


def _parameter(name: str, option: Option) -> inspect.Parameter:
    kind = _READ_AS.get(option.kind, str)
    default = [] if kind == list[str] else option.default
    told = typer.Option(default, option.flag or "", min=_LEAST.get(option.kind), help=option.help)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=told,
        annotation=kind | None if default is None else kind,
    )

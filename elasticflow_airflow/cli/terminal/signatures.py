"""Commands whose options differ from the parameters of their function: shared or substituted options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with every dataclass parameter replaced by one option for each of its fields."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in parameters if is_dataclass(p.annotation)}

    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    options: list[inspect.Parameter] = []
    for parameter in parameters:
        group = groups.get(parameter.name)
        options += [parameter] if group is None else inspect.signature(group, eval_str=True).parameters.values()
    return described_as(command, run, options)


def described_as(
    command: Callable[..., None], run: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """Give ``run`` the name and docstring of a command, and these parameters, which Typer passes by name."""
    described = functools.update_wrapper(run, command)
    described.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what inspect looks for
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    return described

"""Converts Typer commands to a description for argparse, with which Airflow parses ``airflow elasticflow``.

The description is JSON, so that ``__init__.py`` can read it without importing the commands. ``make reference``
generates it. Knows neither Airflow nor what the commands do.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from typer.models import ArgumentInfo, OptionInfo, ParamMeta
from typer.utils import get_params_from_function

_TYPES = {int: "int", float: "float", Path: "path"}


def description_of(name: str, summary: str, commands: Mapping[str, Callable[..., None]]) -> str:
    """Return the description of a group of commands as JSON, one line per argument."""
    described = ",\n".join(_command(name, command) for name, command in sorted(commands.items()))
    return f'{{"name": {json.dumps(name)}, "help": {json.dumps(summary)}, "commands": [\n{described}\n]}}\n'


def _command(name: str, command: Callable[..., None]) -> str:
    paragraphs = [" ".join(text.split()) for text in (inspect.getdoc(command) or "").split("\n\n")]
    summary = paragraphs[0].partition(". ")[0].removesuffix(".")
    head = {"name": name, "help": _escaped(summary), "description": "\n\n".join(paragraphs)}
    parameters = get_params_from_function(command).values()
    arguments = ",\n  ".join(json.dumps(_argument(parameter)) for parameter in parameters)
    return f'{json.dumps(head)[:-1]}, "args": [\n  {arguments}\n]}}'


def _argument(parameter: ParamMeta) -> dict[str, Any]:
    """Return the keyword arguments of argparse's ``add_argument``, with the option names as ``flags``."""
    told = parameter.default
    if not isinstance(told, OptionInfo | ArgumentInfo):
        raise TypeError(f"{parameter.name} has no help: give it a typer.Option or a typer.Argument")
    kind, is_list = _kind(parameter.annotation)
    described: dict[str, Any] = {}
    if isinstance(told, ArgumentInfo):
        described["flags"] = [parameter.name]
        if is_list:
            described["nargs"] = "*"
        elif told.default is not ...:
            described["nargs"] = "?"
        if told.metavar:
            described["metavar"] = told.metavar
    else:
        names = told.param_decls or ("--" + parameter.name.replace("_", "-"),)
        described |= {"flags": [name.partition("/")[0] for name in names], "dest": parameter.name}
        if told.default is ...:
            described["required"] = True
        else:
            described["default"] = told.default or None if is_list else told.default
        if kind is bool:
            is_pair = not told.param_decls or any("/" in name for name in names)
            described["action"] = "on_or_off" if is_pair else "store_true"
        elif is_list:
            described["action"] = "append"
    if kind in _TYPES:
        described["type"] = _TYPES[kind]
    return described | {"help": _escaped(told.help or "")}


def _kind(annotation: Any) -> tuple[type, bool]:
    """Return the type of a value, and whether the parameter is a list of such values."""
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0], True
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    return _kind(kinds[0]) if kinds else (annotation, False)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")

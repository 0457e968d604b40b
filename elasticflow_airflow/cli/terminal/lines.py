"""Single lines on a terminal: answers on standard output, notes on standard error."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from pydantic import BaseModel, TypeAdapter
from rich.console import Console

AsJson = typer.Option(False, "--json", help="Print JSON instead of text.")


def say(line: str, style: str | None = None) -> None:
    """Print a line on standard output, as it is: neither wrapped nor parsed as markup."""
    Console(highlight=False, soft_wrap=True).print(line, style=style, markup=False)


def print_json(value: BaseModel | Sequence[BaseModel]) -> None:
    """Print messages of the API as JSON on standard output, and nothing else."""
    if isinstance(value, BaseModel):
        typer.echo(value.model_dump_json(indent=2))
    else:
        typer.echo(TypeAdapter(list[BaseModel]).dump_json(list(value), indent=2, serialize_as_any=True))


def note(line: str) -> None:
    """Print a line on standard error, in yellow, as it is."""
    Console(stderr=True).print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)

"""Single lines on a terminal: answers on standard output, notes on standard error."""

from __future__ import annotations

from rich.console import Console


def say(line: str, style: str | None = None) -> None:
    """Print a line on standard output, as it is: neither wrapped nor parsed as markup."""
    Console(highlight=False, soft_wrap=True).print(line, style=style, markup=False)


def note(line: str) -> None:
    """Print a line on standard error, in yellow, as it is."""
    Console(stderr=True).print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)

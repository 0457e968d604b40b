"""Finds the commands in a shell script that call one program, and has the real parsers read them; runs none of them."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath

import typer
from typer.testing import CliRunner

from elasticflow_airflow.cli.main import app

_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_BEFORE_COMMANDS = {"do", "then", "else", "if", "while", "until", "!", "{", "time", "sudo"}
_OPERATORS = set("();&|")


def calls_of(program: str, script: str) -> Iterator[list[str]]:
    """Arguments of each call of a program, in any folder, in containers, pipes and substitutions too."""
    for line in script.replace("\\\n", " ").splitlines():
        while found := _SUBSTITUTION.search(line):
            yield from calls_of(program, found[1])
            line = line.replace(found[0], "substituted")
        for words in _commands(line):
            called = _inside_containers(words)
            if called and PurePath(called[0]).name == program:
                yield called[1:]


def _commands(line: str) -> Iterator[list[str]]:
    words: list[str] = []
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    tokens = iter(lexer)
    for token in tokens:
        if token[0] in "<>":
            next(tokens, None)  # Where it goes to.
            if words and words[-1].isdigit():
                words.pop()
        elif set(token) <= _OPERATORS:
            yield _without_prefix(words)
            words = []
        else:
            words.append(token)
    yield _without_prefix(words)


def _without_prefix(words: list[str]) -> list[str]:
    while words and (words[0] in _BEFORE_COMMANDS or _ASSIGNMENT.fullmatch(words[0])):
        words = words[1:]
    return words


def _inside_containers(words: list[str]) -> list[str]:
    """What ``docker compose exec SERVICE ...`` and ``kubectl exec POD -- ...`` run."""
    if words[:1] == ["kubectl"] and "exec" in words and "--" in words:
        return words[words.index("--") + 1 :]
    if words[:2] == ["docker", "compose"] and "exec" in words:
        return words[words.index("exec") + 2 :]
    return words


@functools.cache
def _without_deeds() -> typer.Typer:
    """The commands of ``elasticflow`` with all their options, that do nothing."""
    made = typer.Typer()
    for command in app.registered_commands:
        assert command.callback is not None
        nothing = functools.wraps(command.callback)(lambda **_: None)
        made.command(command.name or command.callback.__name__)(nothing)
    return made


def refusal_of_elasticflow(arguments: Sequence[str]) -> str:
    """What ``elasticflow`` says to arguments that it does not take; nothing for those that it does."""
    done = CliRunner().invoke(_without_deeds(), list(arguments), prog_name="elasticflow")
    return "" if done.exit_code == 0 else done.output or repr(done.exception)

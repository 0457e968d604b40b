"""``cancel --unowned`` asks first, and leaves alone what has found an owner meanwhile."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import typer

from elasticflow_airflow.api.owners import UnownedJob
from elasticflow_airflow.cli import unowned


@pytest.mark.parametrize(("answer", "claim", "left"), [("n", 1, "nothing was cancelled"), ("y", 2, "left alone")])
def test_who_is_asked_and_says_no_or_finds_an_owner_again(make_status, monkeypatch, capsys, answer, claim, left):
    found = [[UnownedJob(job=make_status(claim=number), since_at=1.0, why="")] for number in (1, claim)]
    service = SimpleNamespace(unowned_jobs=lambda _: found.pop(0))  # and no cancel
    monkeypatch.setattr(unowned, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    monkeypatch.setattr(typer, "confirm", lambda _: answer == "y")
    no = pytest.raises(typer.Exit) if answer == "n" else nullcontext()
    with no:
        unowned.cancel_unowned(service, 60.0, "unwanted", yes=False)
    assert left in capsys.readouterr().out

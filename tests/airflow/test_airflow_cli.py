"""``airflow elasticflow``: the commands of ``elasticflow`` with an Airflow connection, and what they cost Airflow."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer
from support.replicas import Replica
from typer.main import get_command

from elasticflow_airflow.airflow_cli import get_commands
from elasticflow_airflow.airflow_cli.argparse_bridge import description_of

WITHOUT_A_SERVICE = {"simulate", "compare", "synthesize", "version", "node"}
"""Commands that need neither a service nor Airflow: there is nothing that a connection could change."""
NOT_UNDER_AIRFLOW = {"url", "state_dir"}
"""Which service: there a connection says it."""
UNDER_AIRFLOW_ALONE = {"conn_id"}
ONLY_THERE = {"feed"}
"""Commands that there are under Airflow alone: it reads all DAGs."""
OPTIONS_ONLY_THERE = {"forecast": {"dag_files", "only_new"}}
"""Arguments that there are under Airflow alone: only Airflow can read DAG files, and only beside them is a miss new."""


@pytest.fixture
def parse():
    """Airflow's parser of our group, and nothing else."""
    from airflow.cli.cli_config import DefaultHelpParser

    (group,) = get_commands()
    parser = DefaultHelpParser(prog="airflow elasticflow")
    subparsers = parser.add_subparsers()
    for command in group.subcommands:
        sub = subparsers.add_parser(command.name, help=command.help)
        for arg in command.args:
            arg.add_to_parser(sub)
        sub.set_defaults(func=command.func)
    return lambda *words: parser.parse_args(words)


def test_both_command_lines_have_the_same_commands_and_options():
    from elasticflow_airflow.cli.main import app

    (group,) = get_commands()
    ours = {command.name: command for command in group.subcommands if command.name not in ONLY_THERE}
    theirs = {name: c for name, c in get_command(app).commands.items() if name not in WITHOUT_A_SERVICE}
    assert set(ours) == set(theirs)
    for name, command in ours.items():
        parser = argparse.ArgumentParser(add_help=False)
        for arg in command.args:
            arg.add_to_parser(parser)
        have = {action.dest: action for action in parser._actions}
        want = {p.name: p for p in theirs[name].params if name == "serve" or p.name not in NOT_UNDER_AIRFLOW}
        more = (set() if name == "serve" else UNDER_AIRFLOW_ALONE) | OPTIONS_ONLY_THERE.get(name, set())
        assert set(have) == set(want) | more, name
        for dest, parameter in want.items():
            if have[dest].option_strings:
                assert set(have[dest].option_strings) == {*parameter.opts, *parameter.secondary_opts}, (name, dest)
            default = getattr(parameter, "default", None)
            wanted = () if callable(default) else (default, default or None)
            assert have[dest].default in (*wanted, None, False), (name, dest)


def test_help_prints_every_word_of_it(monkeypatch):
    """Airflow's help takes brackets for markup."""
    from airflow.cli.cli_parser import LazyRichHelpFormatter

    monkeypatch.setenv("COLUMNS", "200")
    (group,) = get_commands()
    for command in group.subcommands:
        parser = argparse.ArgumentParser(formatter_class=LazyRichHelpFormatter)
        for arg in command.args:
            arg.add_to_parser(parser)
        shown = " ".join(parser.format_help().split())
        for action in parser._actions:
            assert " ".join(action.help.split()) in shown, (command.name, action.dest)


def test_help_says_all_that_the_command_itself_says():
    """Status and further paragraphs, too; a summary of one line stands in the list of commands."""
    from elasticflow_airflow.airflow_cli.commands import commands

    (group,) = get_commands()
    known = commands()
    assert {command.name for command in group.subcommands} == set(known)
    for command in group.subcommands:
        assert command.description.split() == known[command.name].__doc__.split()
        assert command.description.startswith(command.help)
        assert "\n" not in command.help


def test_every_form_of_a_parameter_is_described():
    def command(
        job: str = typer.Argument(..., help="Which job."),
        node: str | None = typer.Argument(None, help="Which node, 50% of them."),
        limit: int = typer.Option(5, help="At most."),
        name: list[str] = typer.Option([], "--name", "-n", help="May be repeated."),  # noqa: B008
        size: float = typer.Option(..., "--size", help="Is required."),
        wait: bool | None = typer.Option(None, "--wait/--leave", help="Or not."),
        plain: bool = typer.Option(False, help="On or off."),
        into: Annotated[Path | None, typer.Option("--into", "-i", help="Where to.")] = None,
    ) -> None:
        """Do one thing. Then another.

        Ends with status 3
        sometimes.
        """

    described = json.loads(description_of("group", "All of them", {"one": command}))
    (one,) = described["commands"]
    assert (one["name"], one["help"]) == ("one", "Do one thing")
    assert one["description"] == "Do one thing. Then another.\n\nEnds with status 3 sometimes."
    assert {arg["flags"][0]: {k: v for k, v in arg.items() if k not in ("flags", "help")} for arg in one["args"]} == {
        "job": {},
        "node": {"nargs": "?"},
        "--limit": {"dest": "limit", "default": 5, "type": "int"},
        "--name": {"dest": "name", "default": None, "action": "append"},
        "--size": {"dest": "size", "required": True, "type": "float"},
        "--wait": {"dest": "wait", "default": None, "action": "on_or_off"},
        "--plain": {"dest": "plain", "default": False, "action": "on_or_off"},
        "--into": {"dest": "into", "default": None, "type": "path"},
    }
    assert one["args"][-1]["flags"] == ["--into", "-i"]
    assert one["args"][1]["help"] == "Which node, 50%% of them."

    def nameless(job: str) -> None: ...

    with pytest.raises(TypeError, match="job has no help"):
        description_of("group", "All of them", {"one": nameless})


def test_defaults_reach_the_function(monkeypatch, parse):
    from elasticflow_airflow.airflow_cli import commands as airflow_commands

    seen = {}

    def submit(script, args, url, state_dir, steps, batch, env: list[str], value, best_effort):
        seen.update(locals())

    monkeypatch.setattr(airflow_commands, "commands", lambda: {"submit": submit})
    given = parse("submit", "--batch", "8", "--steps", "5", "--best-effort", "train.py", "--", "--lr", "0.1")
    given.func(given)
    assert str(seen["script"]) == "train.py"
    assert seen["args"] == ["--lr", "0.1"]
    assert (seen["steps"], seen["batch"], seen["env"], seen["value"], seen["best_effort"]) == (5, 8, [], 1.0, True)
    assert (seen["url"], seen["state_dir"]) == (None, None)


def test_a_command_asks_the_service_of_the_connection(service, parse, capsys, monkeypatch):
    service.known = service.statuses[0]
    given = parse("show", service.known.job_id)
    given.func(given)
    assert "daily.train" in capsys.readouterr().out
    assert [verb for _, verb, _ in service.calls] == ["status", "events"]


def test_a_missing_connection_is_named(parse, capsys):
    given = parse("jobs", "--conn-id", "prod")
    with pytest.raises(SystemExit) as left:
        given.func(given)
    assert left.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("airflow elasticflow: ")
    assert "'prod' is not defined: add a connection" in error


def test_serve_keeps_its_state_where_airflow_says(parse, monkeypatch, tmp_path):
    from elasticflow_airflow.service import __main__ as service

    for name in ("STATE_DIR", "PORT"):
        monkeypatch.setenv(f"ELASTICFLOW_{name}", "")  # What the command sets is taken back at the end.
    seen = {}

    def run(arguments):
        seen.update({name: os.environ[f"ELASTICFLOW_{name}"] for name in ("STATE_DIR", "PORT")})
        return 3

    monkeypatch.setattr(service, "main", run)
    monkeypatch.setenv("AIRFLOW__ELASTICFLOW__STATE_DIR", str(tmp_path))
    given = parse("serve", "--port", "1234")
    with pytest.raises(SystemExit) as left:
        given.func(given)
    assert left.value.code == 3
    assert seen == {"STATE_DIR": str(tmp_path), "PORT": "1234"}


def test_bad_input_ends_it_with_status_2(service, parse, capsys):
    given = parse("amend", "some-job")
    with pytest.raises(SystemExit) as left:
        given.func(given)
    assert left.value.code == 2
    assert "nothing to change" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("amend", "some-job", "--value", "-1"), ("--value=-1.0", "range")),
        (("amend", "some-job", "--value", "nan"), ("--value=nan", "finite")),
        (("amend", "some-job", "--value", "inf"), ("--value=inf", "finite")),
        (("drain", "here", "--in", "-5"), ("--in=-5.0", "range")),
        (("drain", "here", "--in", "nan"), ("--in=nan", "finite")),
        (("capacity", "--hours", "0"), ("--hours=0.0", "range")),
        (("forecast", "--hours", "400", "--fail-on-miss"), ("--hours=400.0", "range")),
        (("forecast", "--hours", "-1"), ("--hours=-1.0", "range")),
        (("forecast", "--hours", "nan"), ("--hours=nan", "finite")),
        (("feed", "--hours", "-1"), ("--hours=-1.0", "range")),
        (("feed", "--hours", "nan"), ("--hours=nan", "range")),
        (("jobs", "--limit", "0"), ("--limit=0", "range")),
        (("jobs", "--state", "bogus"), ("--state=bogus", "submitted", "rejected")),
        (("show", ""), ("is empty",)),
        (("serve", "--port", "70000"), ("--port=70000", "range")),
        (("submit", "--batch", "8", "--steps", "0", "--best-effort", "train.py"), ("--steps=0", "range")),
    ],
    ids=lambda given: " ".join(given),
)
def test_numbers_out_of_range_end_it_with_status_2(service, parse, capsys, words, said):
    service.known = service.statuses[0]
    given = parse(*words)
    with pytest.raises(SystemExit) as left:
        given.func(given)
    assert left.value.code == 2
    captured = capsys.readouterr()
    for word in said:
        assert word in captured.out + captured.err
    assert "pydantic" not in captured.out + captured.err
    assert {verb for _, verb, _ in service.calls} <= {"status"}


def test_doctor_refuses_embedded_services_on_many_machines(parse, capsys, monkeypatch):
    from elasticflow_airflow.airflow_cli import commands as airflow_commands
    from elasticflow_airflow.service.http.routes import doctor_routes

    monkeypatch.setattr(airflow_commands, "_triggerer", lambda: airflow_commands.ok("triggerer", "runs"))
    monkeypatch.setattr(doctor_routes, "look_at_machine", lambda _: [])
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    given = parse("doctor", "--json")
    with pytest.raises(SystemExit) as left:
        given.func(given)
    assert left.value.code == 1
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["connection"]["level"] == "problem"
    assert "CeleryExecutor" in found["connection"]["message"]
    assert "elasticflow serve" in found["connection"]["message"] + found["connection"]["remedy"]


def test_doctor_looks_at_each_address_of_a_connection(parse, capsys, monkeypatch):
    from elasticflow_airflow.airflow_cli import commands as airflow_commands

    monkeypatch.setattr(airflow_commands, "_triggerer", lambda: airflow_commands.ok("triggerer", "runs"))
    first, second = Replica(), Replica(started_at=1.0)
    hosts = ",".join(one.url.removeprefix("http://") for one in (first, second))
    monkeypatch.setenv("AIRFLOW_CONN_GPUS", json.dumps({"conn_type": "elasticflow", "host": hosts}))
    given = parse("doctor", "--json", "--conn-id", "gpus")
    given.func(given)
    found = [one for one in json.loads(capsys.readouterr().out) if one["name"] in ("connection", "replicas")]
    assert [one["level"] for one in found] == ["ok", "ok", "ok"]
    for one, finding in zip((first, second), found, strict=False):
        assert finding["message"].startswith(
            f"the elasticflow service at {one.url} (elasticflow_conn_id='gpus') answered"
        )
    first.kill()
    given.func(given)
    found = {one["message"]: one["level"] for one in json.loads(capsys.readouterr().out)}
    assert found[f"only {second.url} answers: without it, nobody is asked"] == "warning"
    second.kill()
    with pytest.raises(SystemExit):
        given.func(given)
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out) if one["level"] == "problem"}
    assert found["connection"]["message"].count("does not answer") == 2


def test_doctor_knows_whether_a_triggerer_runs(airflow_db):
    from airflow.jobs.job import Job
    from airflow.utils.session import create_session

    from elasticflow_airflow.airflow_cli.commands import _triggerer

    assert _triggerer().level == "warning"
    with create_session() as session:
        job = Job(job_type="TriggererJob")
        job.job_type, job.state = "TriggererJob", "running"
        session.add(job)
        session.flush()
        job_id = job.id
    assert _triggerer().level == "ok"
    with create_session() as session:
        session.delete(session.get(Job, job_id))


def test_every_airflow_command_pays_little_for_it():
    program = """
import airflow.cli.cli_config, sys
before = set(sys.modules)
from elasticflow_airflow.airflow_cli import get_commands
get_commands()
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    new = set(re.findall(r"'([^']+)'", done.stdout.splitlines()[-1]))
    assert new <= {"elasticflow_airflow", "elasticflow_airflow.airflow_cli"}


@pytest.mark.airflow
def test_airflow_itself_has_the_commands_and_finds_a_connection_of_its_database(airflow_db, tmp_path):
    # As a test, each process would make up a key of its own, by which the other cannot read the password.
    environment = {**os.environ, "AIRFLOW__CORE__UNIT_TEST_MODE": "False"}

    def airflow(*words):
        command = [sys.executable, "-m", "airflow", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)

    added = airflow(
        *("connections", "add", "served", "--conn-type", "elasticflow"),
        *("--conn-host", "127.0.0.1", "--conn-port", "1", "--conn-password", "secret"),
    )
    assert added.returncode == 0, added.stderr
    done = airflow("elasticflow", "doctor", "--conn-id", "served")
    assert done.returncode == 1, done.stderr
    assert "connection 'served'" in done.stdout
    assert "does not answer" in done.stdout
    assert "secret" not in done.stdout + done.stderr

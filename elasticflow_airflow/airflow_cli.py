"""The commands of ``airflow elasticflow``: names and options only.

Airflow imports this at every ``airflow`` command, so nothing else is imported here; what a command does is imported
when it runs (``airflow_commands.py``). The options are those of the ``elasticflow`` command, and a test keeps them so.
"""

from __future__ import annotations

from argparse import BooleanOptionalAction
from importlib import import_module
from pathlib import Path
from typing import Any

from airflow.cli.cli_config import ActionCommand, Arg, GroupCommand


def _arg(*flags: str, **keywords: Any) -> Arg:
    return Arg(flags, **keywords)  # type: ignore[no-untyped-call]  # Airflow has no types here


_CONN_ID = _arg(
    "--conn-id",
    default="elasticflow_default",
    help="Airflow connection that names the service. Where the default one is not defined: the embedded service.",
)
_JOB = _arg("job_id", help="Id of the job, as `jobs` lists it.")
_SILENT = _arg(
    "--silent",
    dest="silent_s",
    type=float,
    default=60.0,
    help="With --unowned: nobody has asked for it for so many seconds.",
)
_FOLLOW = "Go on until the job has ended."
_MOMENT = "07:30 (the next one, this machine's time), +2h30m, or 2026-01-31T07:30 (with Z or +01:00: that zone)"

_WAIT = "Print its log and wait for its end; or do not even wait for the verdict. Default: wait for the verdict."


def get_commands() -> list[GroupCommand]:
    """Return the group of commands, for Airflow's command line."""
    return [
        GroupCommand(
            name="elasticflow",
            help="Training jobs with deadlines: see what the scheduler does and why, and look for what is wrong",
            subcommands=(
                _command(
                    "serve",
                    "Run the scheduler service in the foreground",
                    _option("--host", help="Listen on TCP at this address; needs ELASTICFLOW_TOKEN(_FILE)."),
                    _option("--port", type=int, help="TCP port."),
                    _option(
                        "--policy", help="Only elasticflow, the service's one scheduler; others: elasticflow simulate."
                    ),
                    _option("--objective", help="Whom to promise when not everybody can be: first-come, or value."),
                    _option(
                        "--state-dir",
                        help="Where everything lives; default: state_dir of Airflow's section elasticflow.",
                    ),
                    connects=False,
                ),
                _command("health", "Say how the service is, and who holds which slot"),
                _command(
                    "jobs",
                    "List jobs: state, progress, projected finish against the deadline",
                    _option("--state", help="Only jobs in this state."),
                    _option("--dag", dest="dag_id", help="Only jobs of this DAG."),
                    _flag("--live", help="Only jobs that have not ended."),
                    _option("--limit", type=int, default=50, help="At most so many, newest first."),
                    _option("--cursor", help="Go on after a page, as the page before says."),
                    _flag(
                        "--unowned",
                        help="Only live jobs whose Airflow task is gone, or for which nobody asks; since when, why.",
                    ),
                    _SILENT,
                ),
                _command("show", "Show one job and its events: what was decided, and why", _JOB),
                _command("events", "Print the events of a job", _JOB, _flag("--follow", "-f", help=_FOLLOW)),
                _command(
                    "logs",
                    "Print what a worker wrote",
                    _JOB,
                    _option("--worker", help="Name of the log, as `show` lists them; default: the newest rank 0."),
                    _flag("--follow", "-f", help="Go on, through every generation, until the job has ended."),
                ),
                _command(
                    "reproduce",
                    "Print the command that repeats a job's training alone, without the service",
                    _JOB,
                    _option("--incarnation", type=int, help="Which of its trainings; the last."),
                    _option(
                        "--into",
                        type=Path,
                        help="Folder for the checkpoints of the repetition; default: a new one, here.",
                    ),
                ),
                _submit(),
                _command(
                    "amend",
                    "Change a job's deadline or value, if that can be promised",
                    _JOB,
                    _option("--deadline", help=f"The new deadline: {_MOMENT}."),
                    _flag("--best-effort", help="Give the deadline up."),
                    _option("--value", type=float, help="What meeting the deadline is worth."),
                ),
                _command(
                    "cancel",
                    "Cancel a job, or all that nobody wants; its Airflow task, if one is waiting, fails and says so",
                    _arg("job_id", nargs="?", help="Id of the job, as `jobs` lists it."),
                    _option("--reason", default="cancelled on the command line", help="What the event log says."),
                    _flag("--yes", "-y", help="Do not ask."),
                    _flag("--unowned", help="All jobs that `jobs --unowned` lists, instead of one."),
                    _SILENT,
                ),
                _command(
                    "drain",
                    "Say that a node goes away: its workers are moved elsewhere before",
                    _arg("node_id", help="The node, as `health` names it."),
                    _option("--in", dest="after_s", type=float, default=60.0, help="It goes away in so many seconds."),
                    _flag("--undo", help="The node stays after all."),
                ),
                _command(
                    "forecast",
                    "Say which deadlines of the next hours will be kept, those of DAG files to be merged too",
                    _arg("dag_files", nargs="*", metavar="DAG_FILE", help="Their runs are taken as if they were due."),
                    _option("--hours", type=float, default=24.0, help="How far to look."),
                    _flag("--fail-on-miss", help="End with status 1 if a deadline will not be kept; for CI."),
                    _flag("--only-new", help="Only what would be kept without the DAG files counts as a miss."),
                    _flag("--check", help="End with status 3 if a deadline will not be kept."),
                    _option("--conn-id", help="Airflow connection that names the service. Default: as the tasks say."),
                    connects=False,
                    runs="elasticflow_airflow.forecast_command.forecast",
                ),
                _command(
                    "capacity",
                    "Say which nodes nobody needs in the next hours, or how many more are wanted, and by whom",
                    _option("--hours", type=float, default=24.0, help="How far to look."),
                    _flag("--json", dest="as_json", help="Print JSON instead of text."),
                ),
                _command(
                    "feed",
                    "Tell the services when the elastic tasks of all DAGs are due; for a cron task",
                    _option("--hours", type=float, default=48.0, help="How far ahead."),
                    _option("--dag", dest="dag_id", help="Only this DAG."),
                    _flag("--dry-run", help="Print what would be told; tell nobody."),
                    connects=False,
                    runs="elasticflow_airflow.feed_command.feed",
                ),
                _command(
                    "doctor",
                    "Look for what is wrong, and say what to do",
                    _flag("--json", dest="as_json", help="Print JSON instead of text."),
                ),
            ),
        )
    ]


def _submit() -> ActionCommand:
    return _command(
        "submit",
        "Submit a training script with a deadline, without a DAG",
        _arg("script", help="The script to train; its folder is taken along."),
        _arg("args", nargs="*", help="Its arguments, last of all; put -- before the first that begins with -."),
        _option("--steps", type=int, help="How many optimizer steps to train; or --epochs."),
        _option("--epochs", type=int, help="How many epochs."),
        _option("--samples", type=int, help="Samples of an epoch, if they are known."),
        _option("--batch", type=int, required=True, help="Samples of a step, over all workers."),
        _option("--deadline", help=f"When it must have ended: {_MOMENT}."),
        _flag("--best-effort", help="No deadline: trains with what others leave."),
        _option("--on-reject", default="fail", help="If not: fail, best_effort, wait, renegotiate or late."),
        _option("--latest-deadline", help="With renegotiate or late: the latest deadline that will do."),
        _option("--value", type=float, default=1.0, help="What meeting the deadline is worth."),
        _option("--min-workers", type=int, default=1, help="Never fewer; a power of two."),
        _option("--max-workers", type=int, help="Never more; a power of two."),
        _option("--target-loss", type=float, help="End when the smoothed loss is there."),
        _option("--consistency", default="consistent", help="consistent: the same weights for any size; or fast."),
        _option("--logical-workers", type=int, help="Shares that each step is cut into, whatever the workers."),
        _option("--seed", type=int, help="Of all that is random; default: the script's, or 0."),
        _option("--progress-regex", help="For scripts that know nothing of us: how a line of output tells the step."),
        _option("--progress-file", help="The same by a file, in its working directory, to which it writes its step."),
        _option("--python", help="Interpreter on the service's machine; default: its own."),
        _option("--working-dir", help="Working directory on the service's machine."),
        _option("--env", action="append", help="NAME=VALUE for the script; may be repeated."),
        _option("--secret-env", action="append", help="NAME of a variable that is passed on as a secret."),
        _option("--name", help="Runs of one name share what is learned of their speed; default: the script's name."),
        _option("--run", help="Name of the run; with one that exists it is attached to. Default: a new one."),
        _flag("--dry-run", help="Ask what would be promised; submit nothing."),
        _option("--wait", "-w", action=BooleanOptionalAction, help=_WAIT),
    )


def _command(
    name: str,
    help: str,  # noqa: A002 - as Airflow has it
    *args: Arg,
    connects: bool = True,
    runs: str | None = None,
) -> ActionCommand:
    """Make a command. ``runs`` names the function that takes all that was given; else it is that of ``elasticflow``."""

    def run(given: Any) -> None:
        if runs is not None:
            module, _, function = runs.rpartition(".")
            getattr(import_module(module), function)(given)
            return
        from elasticflow_airflow.airflow_commands import run_command

        run_command(name, given)

    run.__name__ = name
    return ActionCommand(name=name, help=help, func=run, args=(*args, *((_CONN_ID,) if connects else ())))


def _option(*flags: str, **keywords: Any) -> Arg:
    return _arg(*flags, **{"default": None, **keywords})


def _flag(*flags: str, **keywords: Any) -> Arg:
    return _arg(*flags, action="store_true", **keywords)

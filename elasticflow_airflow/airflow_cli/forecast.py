"""``airflow elasticflow forecast [DAG_FILE ...]``: whether all deadlines will be met, before a DAG is merged."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import pendulum
import typer
from pydantic import Field, ValidationError

from elasticflow_airflow.airflow_cli.process_context import reading_the_database
from elasticflow_airflow.api import ForecastAnswer, Wire
from elasticflow_airflow.cli.connection import BAD_INPUT, what_is_wrong
from elasticflow_airflow.cli.forecast import MISSED, NOT_KEPT, Check, FailOnMiss, Hours
from elasticflow_airflow.cli.terminal.lines import AsJson, note, print_json, say

_AWAY_S = 10.0


def forecast(
    dag_files: list[str] = typer.Argument(  # noqa: B008
        [], metavar="DAG_FILE", help="Their runs are taken as if they were due."
    ),
    hours: float = Hours,
    fail_on_miss: bool = FailOnMiss,
    only_new: bool = typer.Option(
        False, "--only-new", help="Only what would be kept without the DAG files counts as a miss."
    ),
    check: bool = Check,
    as_json: bool = AsJson,
    conn_id: str | None = typer.Option(
        None, "--conn-id", help="Airflow connection that names the service. Default: as the tasks say."
    ),
) -> None:
    """Say which deadlines of the next hours will be kept, those of DAG files to be merged too.

    Ends with status 2 when the question could not be asked: a DAG file that cannot be read, a task that could not be
    submitted, a service that is away.
    """
    from airflow.sdk.exceptions import AirflowException

    from elasticflow_airflow.client import ElasticFlowError
    from elasticflow_airflow.recurring.runs_of_dag_files import BadDagFileError

    try:
        with reading_the_database():
            missed = _forecast(dag_files, hours, conn_id, only_new=only_new, as_json=as_json)
    except BadDagFileError as error:
        say(f"{error}", "red")
        sys.exit(BAD_INPUT)
    except ValidationError as error:
        say(what_is_wrong(error), "red")
        sys.exit(BAD_INPUT)
    except (ElasticFlowError, AirflowException) as error:
        say(f"the service could not be asked: {error}", "red")
        sys.exit(BAD_INPUT)
    if missed and (fail_on_miss or check):
        sys.exit(MISSED if fail_on_miss else NOT_KEPT)


class ForecastByConnection(Wire):
    """What ``--json`` prints: the forecast of each connection's service, and the tasks that none of them includes."""

    forecasts: dict[str, ForecastAnswer] = Field(default_factory=dict)
    unknown: list[str] = Field(default_factory=list)
    best_effort: list[str] = Field(default_factory=list)


def _forecast(dag_files: list[str], hours: float, chosen_conn_id: str | None, *, only_new: bool, as_json: bool) -> int:
    """Request the forecast and print it; return how many deadlines will be missed."""
    from elasticflow_airflow.cli.forecast import print_outlook
    from elasticflow_airflow.client import ElasticFlowClient, for_looking
    from elasticflow_airflow.hooks import ElasticFlowHook
    from elasticflow_airflow.recurring.runs_of_dag_files import PlannedRuns, connections_of, plan, read_dags, trimmed

    def tell(line: str, style: str | None = None) -> None:
        """Print a line that is not part of the JSON."""
        if as_json:
            note(line)
        else:
            say(line, style)

    made, hooks = PlannedRuns(), {}
    forecasts: dict[str, ForecastAnswer] = {}
    unknowns: list[str] = []
    if dag_files:
        dags = read_dags(dag_files)
        conn_ids = {chosen_conn_id} if chosen_conn_id else connections_of(dags)
        hooks = {conn_id: ElasticFlowHook(conn_id) for conn_id in sorted(conn_ids)}
        names = {conn_id: hook.namespace for conn_id, hook in hooks.items()}
        if chosen_conn_id:
            names[""] = names[chosen_conn_id]
        window = timedelta(hours=hours)
        made, left_out = trimmed(plan(dags, namespaces=names, now=pendulum.now("UTC"), window=window))
        if left_out:
            tell(f"{left_out} of the latest runs are left out: so many cannot be asked about at once", "yellow")
        if not made.tasks:
            tell("no elastic task in these files")
            if as_json:
                print_json(ForecastByConnection())
            return 0
    if not made.runs and dag_files:
        tell("no run of these files is due by a timetable: asking about everything else")
    by_conn = made.runs
    if chosen_conn_id or not by_conn:
        conn_id = chosen_conn_id or ElasticFlowHook.default_conn_name
        by_conn = {conn_id: [run for runs in made.runs.values() for run in runs]}
    missed = 0
    for conn_id, runs in by_conn.items():
        hook = hooks.get(conn_id) or ElasticFlowHook(conn_id)
        with ElasticFlowClient(for_looking(hook.endpoint(start=False)), retry_for_s=_AWAY_S) as service:
            answer = service.forecast(hours, runs)
            before = service.forecast(hours) if runs and answer.not_kept else answer
        forecasts[conn_id] = answer
        if not as_json:
            print_outlook(answer)
        already = {_key(item) for item in before.items if item.outcome in ("missed", "at_risk")} if runs else set()
        bad = [item for item in answer.items if item.outcome in ("missed", "at_risk")]
        new = [item for item in bad if item.planned or _key(item) not in already]
        missed += len(new) if only_new else len(bad)
        tell(f"{conn_id}: {answer.summary}" if len(by_conn) > 1 else answer.summary)
        if runs and len(new) < len(bad):
            tell(f"{len(bad) - len(new)} of them would not be kept without these files either")
    for unknown in made.unknown:
        due = "" if unknown.due is None else f", due {unknown.due:%a %Y-%m-%d %H:%M %Z}"
        unknowns.append(f"{unknown.task}{due} cannot be predicted: {unknown.reason}")
        tell(unknowns[-1], "yellow")
    if made.best_effort:
        tell(f"best effort, without a deadline: {', '.join(made.best_effort)}")
    if as_json:
        print_json(ForecastByConnection(forecasts=forecasts, unknown=unknowns, best_effort=made.best_effort))
    return missed


def _key(item: Any) -> tuple[Any, ...]:
    return (item.kind, item.task, item.job_id, item.due_at)

"""Builds the submission of a rendered elastic task: identity, code, length, deadline and secrets.

Reads Airflow's context and connections, and the script's folder; does not call the service.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Protocol

import pendulum
from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.sdk.execution_time import task_runner
from airflow.sdk.log import mask_secret, redact  # type: ignore[attr-defined]  # Airflow's providers do so
from pydantic import SecretStr, ValidationError

from elasticflow_airflow.api import JobIdentity, JobSubmission
from elasticflow_airflow.api.training_options import OPTIONS, ValueKind, names_of, on_wire
from elasticflow_airflow.client import Snapshot, SnapshotError, snapshot_module, snapshot_script
from elasticflow_airflow.deadlines.clock import now_s
from elasticflow_airflow.deadlines.downstream import EndedJob
from elasticflow_airflow.deadlines.parse import DAG_RUN, DeadlineError, show_at
from elasticflow_airflow.requirement_lines import read_requirements
from elasticflow_airflow.settings import AirflowSettings
from elasticflow_airflow.task.arguments import (
    ArgumentError,
    check_each,
    count,
    present,
    rendered_texts,
    secret_reference,
    target,
)
from elasticflow_airflow.task.run_deadline import (
    ARITHMETIC_LABEL,
    Deadlined,
    DeadlinesOfRun,
    RunOfDag,
    due_times,
    run_of_dag,
)
from elasticflow_airflow.task.telemetry import trace_labels
from elasticflow_airflow.times import duration
from elasticflow_airflow.waiting.leased_jobs import LEASE_S, ORPHAN_S
from elasticflow_airflow.waiting.task_memory import TaskMemory


class ElasticTask(Deadlined, Protocol):
    """The rendered arguments of an elastic task that are converted before sending; ``OPTIONS`` lists the others."""

    script: Any
    module: Any
    script_args: Any
    env: Any
    secret_env: Any
    working_dir: Any
    requirements: Any
    init_from: Any
    on_past_deadline: str
    target_loss: Any

    def get_flat_relative_ids(self, *, upstream: bool = False) -> set[str]:
        """Return the ids of all downstream tasks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The submission, the code to upload, and notes and warnings on both for the task's log."""

    submission: JobSubmission
    snapshot: Snapshot
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The facts about the run that a submission needs."""

    identity: JobIdentity
    run: RunOfDag
    timezone: tzinfo
    dag_folder: Path
    bundle_root: Path | None
    attempt: int
    max_tries: int
    """Airflow increases it whenever the task is cleared."""
    is_dag_test: bool
    replays: bool
    """Whether this is a backfill, or a task or run that was cleared. Its deadline may be long past and is moot."""
    began_at: float | None = None
    """When the run began (UTC seconds); may be long after it was due if the DAG was paused or catches up."""
    ended_jobs: Callable[[JobIdentity], Sequence[EndedJob]] | None = None
    """Lists past trainings of this task, needed if Airflow's history alone does not show downstream durations.

    None if the run is only planned, so that there is no task process that could ask Airflow.
    """


def run_facts(
    context: Mapping[str, Any],
    *,
    namespace: str,
    retries: int,
    dag_alerts: Sequence[Any] = (),
    ended_jobs: Callable[[JobIdentity], Sequence[EndedJob]],
) -> RunFacts:
    """Read the facts from Airflow's context. ``dag_alerts``: alerts at parse time, used if the context's DAG has none.

    Raises ArgumentError for ids that no service accepts.
    """
    task_instance, dag_run, dag = context["ti"], context["dag_run"], context["dag"]
    bundle = getattr(task_instance, "bundle_instance", None)
    # Clearing a task raises max_tries above the task's retries; clearing the whole run increases clear_number.
    max_tries = int(getattr(task_instance, "max_tries", 0) or 0)
    cleared = max_tries > retries or bool(getattr(dag_run, "clear_number", 0))
    try:
        identity = JobIdentity(
            namespace=namespace,
            dag_id=task_instance.dag_id,
            run_id=task_instance.run_id,
            task_id=task_instance.task_id,
            map_index=-1 if task_instance.map_index is None else task_instance.map_index,
        )
    except ValidationError as error:
        raise ArgumentError(f"task {task_instance.task_id!r} cannot be submitted: {_what_is_wrong(error)}") from error
    return RunFacts(
        identity=identity,
        run=run_of_dag(context, dag_alerts),
        timezone=dag.timezone,
        dag_folder=Path(dag.folder).absolute(),
        bundle_root=Path(bundle.path).absolute() if bundle is not None else None,
        attempt=task_instance.try_number,
        max_tries=max_tries,
        is_dag_test=is_dag_test(context),
        replays=_text(dag_run.run_type) == "backfill" or cleared,
        began_at=_seconds(getattr(dag_run, "start_date", None)),
        ended_jobs=ended_jobs,
    )


def is_dag_test(context: Mapping[str, Any]) -> bool:
    """Whether this runs inside ``dag.test()``: one process, one task at a time, no triggerer.

    False with ``use_executor=True``, where tasks have processes of their own, whose end must not end their jobs.
    """
    comms = getattr(task_runner, "SUPERVISOR_COMMS", None)
    in_process = comms is None or type(comms).__name__ == "InProcessSupervisorComms"
    return in_process and getattr(context["dag_run"], "triggering_user_name", None) == "dag_test"


def prepare(
    task: ElasticTask,
    given: Mapping[str, Any],
    facts: RunFacts,
    memory: TaskMemory,
    settings: AirflowSettings,
    *,
    snapshot: Snapshot | None = None,
) -> Prepared:
    """Check the rendered arguments and build the submission. ``given`` holds them as written in the DAG file.

    ``snapshot``: the code, if it has already been taken. Raises ArgumentError, DeadlineError or SnapshotError; nothing
    has been sent then.
    """
    for name in names_of(ValueKind.PATH, ValueKind.TEXT, ValueKind.MOMENT):
        if name in given:
            present(name, getattr(task, name), given[name])
    check_downstream(task.deadline_of, task)
    counts = {name: count(name, getattr(task, name), given[name]) for name in names_of(ValueKind.COUNT)}
    if counts["samples"] is not None and counts["epochs"] is None:
        counts["epochs"] = 1
    now = pendulum.from_timestamp(now_s())
    deadlines = DeadlinesOfRun(
        task,
        facts.run,
        facts.identity,
        facts.timezone,
        memory,
        now=now,
        ended_jobs=facts.ended_jobs,
    )
    deadline_at, latest_at = (deadlines.compute(argument) for argument in ("deadline", "latest_deadline"))
    if deadline_at is not None and latest_at is not None and latest_at <= deadline_at:
        raise DeadlineError(
            f"latest_deadline={task.latest_deadline!r} is {show_at(latest_at, facts.timezone)}, and that is not later"
            f" than the deadline {show_at(deadline_at, facts.timezone)}: give a later one, up to which a later deadline"
            " would be acceptable"
        )
    notes, warnings = deadlines.notes, list(deadlines.warnings)
    last_at = deadline_at if latest_at is None else latest_at
    late_s = _began_late_s(facts, last_at)
    if late_s is not None and last_at is not None and task.on_past_deadline == "auto":
        warnings.append(
            f"this run began {duration(late_s)} after it was due, when its deadline"
            f" {show_at(last_at, facts.timezone)} had passed: it trains as best effort (on_past_deadline='fail' refuses"
            " such a run)"
        )
    arithmetic = {ARITHMETIC_LABEL: notes[0]} if deadline_at is not None else {}
    snapshot = snapshot or take_snapshot(task.script, task.module, facts, settings.snapshot_max_bytes)
    notes.append(f"code: {snapshot.root} ({len(snapshot.files)} files, {len(snapshot.tar) / 1024:.0f} KiB)")
    if snapshot.ignored:
        names = ", ".join(snapshot.ignored[:8]) + (", ..." if len(snapshot.ignored) > 8 else "")
        notes.append(f"left out of the code by ignore files: {names}")
    lease_s, orphan_s = (LEASE_S, ORPHAN_S) if facts.is_dag_test else (settings.lease_s, settings.orphan_s)
    message = on_wire(
        {name: getattr(task, name) for name in OPTIONS}
        | counts
        | {
            "script": snapshot.entry if task.script is not None else None,
            "script_args": rendered_texts("script_args", task.script_args, given["script_args"]),
            "env": _rendered_env(task.env, given["env"]),
            "secret_env": {},  # set after all checks, since a validation error quotes its input
            "working_dir": find_working_dir(task.working_dir, facts),
            "requirements": find_requirements(task.requirements, given["requirements"], facts),
            "target_loss": target(task.target_loss, given["target_loss"]),
            "init_from": task.init_from or None,
            "deadline": deadline_at,
            "latest_deadline": latest_at,
            "on_past_deadline": _on_past_deadline(
                task.on_past_deadline, replays=facts.replays, began_too_late=late_s is not None
            ),
        }
    )
    message["command"]["snapshot"] = snapshot.sha256
    message |= {
        "identity": facts.identity,
        "lease_s": lease_s,
        "orphan_s": orphan_s,
        "labels": {
            "try_number": str(facts.attempt),
            "dag_test": str(facts.is_dag_test).lower(),
            **arithmetic,
            **trace_labels(),
        },
        **due_times(facts.run, replays=facts.replays, now=now, began_too_late=late_s is not None),
    }
    try:
        submission = JobSubmission.model_validate(message)
    except ValidationError as error:
        raise ArgumentError(f"task {task.task_id!r} cannot be submitted: {_what_is_wrong(error)}") from error
    secrets = {name: SecretStr(value) for name, value in resolve_secrets(task.secret_env).items()}
    command = submission.command.model_copy(update={"args_shown": _args_shown(submission.command.args)})
    return Prepared(
        submission=submission.model_copy(update={"secret_env": secrets, "command": command}),
        snapshot=snapshot,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _what_is_wrong(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())


def find_requirements(requirements: Any, given: Any, facts: RunFacts) -> tuple[str, ...]:
    """Return the requirements in a rendered list, or in the file that it names. Raises ArgumentError."""
    if given is None:
        return ()
    present("requirements", requirements, given)
    if not isinstance(requirements, str):
        return rendered_texts("requirements", requirements, given)
    path = _find_file("requirements", requirements, facts)
    try:
        return read_requirements(path)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"requirements={requirements!r} cannot be used: {error}") from error


def find_script(script: str, facts: RunFacts) -> Path:
    """Find a script: absolute, or relative to the DAG file's folder or the bundle's root. Raises ArgumentError."""
    return _find_file("script", script, facts)


def _find_file(name: str, value: str, facts: RunFacts) -> Path:
    path = Path(value).expanduser()
    tried = [path] if path.is_absolute() else [facts.dag_folder / path]
    if not path.is_absolute() and facts.bundle_root not in (None, facts.dag_folder):
        assert facts.bundle_root is not None  # checked above
        tried.append(facts.bundle_root / path)
    for candidate in tried:
        if candidate.is_file():
            return candidate
    raise ArgumentError(
        f"{name}={value!r} is not there: looked for {', '.join(map(str, tried))}; give a path relative to the DAG"
        " file, or an absolute one"
    )


def take_snapshot(script: str | None, module: str | None, facts: RunFacts, max_bytes: int) -> Snapshot:
    """Snapshot the code of a task. Raises ArgumentError if it does not exist, SnapshotError if it is too large."""
    if script is not None:
        return snapshot_script(find_script(script, facts), max_bytes=max_bytes)
    assert module is not None  # checked at DAG parse: one of the two
    try:
        return snapshot_module(module, max_bytes=max_bytes)
    except SnapshotError as error:
        if error.error == "script_missing":
            raise ArgumentError(f"module={module!r}: {error}") from error
        raise


def find_working_dir(working_dir: str | None, facts: RunFacts) -> str | None:
    """Make a working directory absolute; a relative one is relative to the DAG file's folder."""
    if working_dir is None:
        return None
    path = Path(working_dir).expanduser()
    return str(path if path.is_absolute() else facts.dag_folder / path)


def _rendered_env(env: Any, given: Any) -> dict[str, str]:
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise ArgumentError(f"env rendered to a {type(env).__name__}: it must map names to values")
    for name, value in env.items():
        present(f"env[{name!r}]", value, given.get(name) if isinstance(given, Mapping) else given)
    check_each({"env": env})
    return {str(name): str(value) for name, value in env.items()}


def _args_shown(args: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the arguments with what Airflow masks in logs (such as connection values) redacted; None if unchanged."""
    shown = tuple(str(redact(arg)) for arg in args)
    return None if shown == args else shown


def check_downstream(deadline_of: str | None, task: Any) -> None:
    """Refuse a ``deadline_of`` that does not name a task downstream of this one. Raises ArgumentError."""
    if deadline_of in (None, DAG_RUN, task.task_id):
        return
    downstream = set(task.get_flat_relative_ids(upstream=False))
    if deadline_of in downstream:
        return
    known = ", ".join(sorted(downstream)) or "none"
    raise ArgumentError(
        f"deadline_of={deadline_of!r} is no task downstream of {task.task_id!r} (downstream: {known}); within a task"
        f" group write the full id, like 'group.publish'; or use {DAG_RUN!r}"
    )


def resolve_secrets(secret_env: Mapping[str, str] | None) -> dict[str, str]:
    """Read the values that ``secret_env`` refers to from Airflow's connections, and mask them in logs from now on.

    Raises ArgumentError if a connection or a field of it does not exist.
    """
    resolved: dict[str, str] = {}
    for name, reference in (secret_env or {}).items():
        conn_id, field, key = secret_reference(name, reference)
        try:
            connection = BaseHook.get_connection(conn_id)
        except AirflowNotFoundException as error:
            raise ArgumentError(
                f"secret_env[{name!r}]={reference!r}: connection {conn_id!r} is not defined: define it (airflow"
                f" connections add, a secrets backend, or AIRFLOW_CONN_{conn_id.upper()}), or name another"
            ) from error
        value = connection.extra_dejson.get(key) if key is not None else getattr(connection, field)
        if value is None or value == "":
            what = field if key is None else f"{key!r} in its extra"
            raise ArgumentError(
                f"secret_env[{name!r}]={reference!r}: connection {conn_id!r} has no such value: give it a"
                f" {what}, or name the field that holds the secret"
            )
        mask_secret(str(value))
        resolved[name] = str(value)
    return resolved


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _began_late_s(facts: RunFacts, last_at: float | None) -> float | None:
    """Return how long after its due time a run began, in seconds, if its deadline had passed by then; else None.

    Also None if the task itself came late in a run that began in time, and if the deadline had passed before the run
    was due.
    """
    due_at = facts.run.run_after.timestamp()
    if last_at is None or facts.began_at is None or not due_at < last_at <= facts.began_at:
        return None
    return facts.began_at - due_at


def _on_past_deadline(asked: str, *, replays: bool, began_too_late: bool) -> str:
    """Return what the service should do with a deadline that has passed by the time the job is submitted.

    A retry of a job that has already trained follows ``on_miss``. Backfills, cleared tasks and runs that began too late
    train as best effort by default, because no promise is broken there.
    """
    if asked == "auto":
        return "best_effort" if replays or began_too_late else "on_miss"
    return "on_miss" if asked == "fail" and not replays else asked

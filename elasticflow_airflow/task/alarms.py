"""Calls a task's callbacks when its training may miss its deadline, once each time the job becomes at risk.

A callback receives Airflow's context, as ``on_failure_callback`` does, with ``context["elasticflow"]``: what is known
about the job, and a ``message`` for people. So any notifier of any provider works, with ``{{ elasticflow.message }}``
in its text. Callbacks run in a worker: a deferred task is resumed for them, and then waits again.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from datetime import tzinfo
from typing import Any, cast

from airflow.sdk import BaseNotifier

from elasticflow_airflow.api import EventKind, JobStatus, State
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError
from elasticflow_airflow.deadlines.parse import show_at
from elasticflow_airflow.task.callables import loaded
from elasticflow_airflow.task.outcome_messages import result_of
from elasticflow_airflow.times import duration
from elasticflow_airflow.waiting.progress_lines import Logger, progress_line
from elasticflow_airflow.waiting.task_memory import TaskMemory

CONTEXT_KEY = "elasticflow"


class RiskAlarm:
    """Calls ``callbacks`` (callables or import paths) when the job is at risk; records in ``memory`` that it did."""

    def __init__(
        self,
        callbacks: Sequence[Any],
        *,
        context: Mapping[str, Any],
        client: ElasticFlowClient,
        memory: TaskMemory,
        timezone: tzinfo,
        log: Logger,
    ) -> None:
        self._callbacks = callbacks
        self._context = context
        self._client = client
        self._memory = memory
        self._timezone = timezone
        self._log = log

    def look(self, status: JobStatus) -> None:
        """Call the callbacks if the job has become at risk since the last call."""
        if not status.at_risk or status.state.terminal:
            self._memory.told_at_risk = False
            return
        if self._memory.told_at_risk:
            return
        self._memory.told_at_risk = True
        if not self._callbacks:
            return
        details = describe(status, self._timezone, reason=self._reason(status))
        remember(self._context, details)
        self._log.warning("%s", details["message"])
        for callback in self._callbacks:
            try:
                function = loaded(callback)
                # Copy a notifier, since it keeps its rendered fields and would send the same message the next time.
                (copy(function) if isinstance(function, BaseNotifier) else function)(self._context)
            except Exception:  # noqa: BLE001 - logged in full; the training must not fail because a chat is down
                self._log.exception("on_at_risk: %s failed; the training goes on", callback)

    def _reason(self, status: JobStatus) -> str:
        try:
            events = self._client.events(status.job_id)
        except ElasticFlowError as error:
            return f"(the reason could not be read: {error})"
        return next((event.reason for event in reversed(events) if event.kind == EventKind.AT_RISK), "")


def describe(status: JobStatus, timezone: tzinfo, *, reason: str = "") -> dict[str, Any]:
    """Return the value of ``context["elasticflow"]``: the fields of a result, the job's progress, and ``message``.

    Times are ISO 8601 in the DAG's zone, durations are seconds.
    """
    said = reason or status.failure or status.state_reason or status.verdict.reason
    return {
        **result_of(status, timezone),
        "state": status.state.value,
        "at_risk": status.at_risk,
        "step": status.step,
        "total_steps": status.total_steps,
        "loss": status.loss,
        "workers": status.workers,
        "slack_s": status.slack_s,
        "reason": said,
        "message": message_of(status, timezone, said),
    }


def message_of(status: JobStatus, timezone: tzinfo, said: str = "") -> str:
    """Return a short message on a job's state, for a chat or an email."""
    who = f"{status.identity.dag_id}.{status.identity.task_id}"
    if status.identity.map_index >= 0:
        who += f"[{status.identity.map_index}]"
    who += f" (run {status.identity.run_id})"
    if status.at_risk:
        head = f"Training {who} may miss its deadline"
        if status.deadline_at is not None:
            head += f" {show_at(status.deadline_at, timezone)}"
            if status.slack_s is not None and status.slack_s < 0:
                head += f" by {duration(-status.slack_s)}"
    elif status.state is State.SUCCEEDED:
        missed = status.result is not None and status.result.met is False
        head = f"Training {who} succeeded{', after its deadline' if missed else ''}"
    elif status.state.terminal:
        head = f"Training {who} {'' if status.state is State.FAILED else 'was '}{status.state.value}"
    else:
        head = f"Training {who} is {status.state.value}"
    lines = [head, progress_line(status, timezone)]
    if said:
        lines.append(said if len(said) <= 500 else f"{said[:500]} ...")
    return "\n".join(lines)


def remember(context: Mapping[str, Any], details: dict[str, Any]) -> None:
    """Store the details in Airflow's context, where the task's other callbacks find them, too."""
    cast(MutableMapping[str, Any], context)[CONTEXT_KEY] = details

"""A training task's part in Airflow's own monitoring: the trace context, and values for Airflow's metrics.

Both go where Airflow is configured to send them, and nowhere otherwise. Does not call the service.
"""

from __future__ import annotations

from airflow.sdk.observability import stats

from elasticflow_airflow.api import TRACEPARENT, JobStatus


def trace_labels() -> dict[str, str]:
    """Return the labels that link the service's spans to the task's trace; empty if tracing is off."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {TRACEPARENT: carrier["traceparent"]} if "traceparent" in carrier else {}


def count_submitted(status: JobStatus) -> None:
    """Count a task that has submitted its job, or attached to it."""
    stats.incr("elasticflow.submitted", tags=_tags(status))


def count_ended(status: JobStatus) -> None:
    """Count a task whose job has ended, and report the deadline's outcome."""
    tags = _tags(status)
    stats.incr("elasticflow.ended", tags={**tags, "state": status.state.value})
    result = status.result
    if result is None or result.met is None or result.slack_s is None:
        return
    stats.incr(f"elasticflow.deadline_{'met' if result.met else 'missed'}", tags=tags)
    stats.gauge("elasticflow.slack_s", result.slack_s, tags=tags)


def _tags(status: JobStatus) -> dict[str, str]:
    return {"dag_id": status.identity.dag_id, "task_id": status.identity.task_id}

"""What a training task tells Airflow's own monitoring: its place in a trace, and numbers for Airflow's metrics.

Both go where Airflow is configured to send them, and nowhere otherwise. Knows nothing of the service.
"""

from __future__ import annotations

from airflow.sdk.observability import stats

from elasticflow_airflow.api import TRACEPARENT, JobStatus


def trace_labels() -> dict[str, str]:
    """Labels of a submission by which the service's spans join the task's trace; empty where nobody traces."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return {TRACEPARENT: carrier["traceparent"]} if "traceparent" in carrier else {}


def count_submitted(status: JobStatus) -> None:
    """A task has submitted its job, or attached to it."""
    stats.incr("elasticflow.submitted", tags=_tags(status))


def count_ended(status: JobStatus) -> None:
    """A task has seen its job end."""
    tags = _tags(status)
    stats.incr("elasticflow.ended", tags={**tags, "state": status.state.value})
    result = status.result
    if result is None or result.met is None or result.slack_s is None:
        return
    stats.incr(f"elasticflow.deadline_{'met' if result.met else 'missed'}", tags=tags)
    stats.gauge("elasticflow.slack_s", result.slack_s, tags=tags)


def _tags(status: JobStatus) -> dict[str, str]:
    return {"dag_id": status.identity.dag_id, "task_id": status.identity.task_id}

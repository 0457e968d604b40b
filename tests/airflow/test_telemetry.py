"""A task's place in a trace goes with its submission, and Airflow's metrics hear how its job ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elasticflow_airflow.api import JobResult, State
from elasticflow_airflow.task import telemetry


@pytest.fixture
def counted(monkeypatch):
    seen: list[tuple] = []
    for name in ("incr", "gauge"):
        monkeypatch.setattr(telemetry.stats, name, lambda *args, _name=name, tags: seen.append((_name, *args, tags)))
    return seen


def test_nobody_traces():
    assert telemetry.trace_labels() == {}


def test_the_current_span_goes_with_the_submission():
    from opentelemetry.sdk.trace import TracerProvider

    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("worker.train") as span:
        labels = telemetry.trace_labels()
    context = span.get_span_context()
    assert labels["traceparent"].startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")


@pytest.mark.parametrize(("met", "slack_s", "said"), [(True, 60.0, "met"), (False, -5.0, "missed")])
def test_the_end_of_a_job_is_counted(make_status, counted, met, slack_s, said):
    telemetry.count_ended(make_status(State.SUCCEEDED, result=JobResult(met=met, slack_s=slack_s)))
    tags = {"dag_id": "daily", "task_id": "train"}
    assert counted == [
        ("incr", "elasticflow.ended", {**tags, "state": "succeeded"}),
        ("incr", f"elasticflow.deadline_{said}", tags),
        ("gauge", "elasticflow.slack_s", slack_s, tags),
    ]


def test_a_job_without_a_deadline_has_no_slack(make_status, counted):
    telemetry.count_submitted(make_status())
    telemetry.count_ended(make_status(State.FAILED))
    assert [name for _, name, *_ in counted] == ["elasticflow.submitted", "elasticflow.ended"]


def test_airflows_own_span_of_a_task_goes_with_the_submission():
    """In a process of its own: a provider is set once for all."""
    program = """
from types import SimpleNamespace
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
from airflow.sdk.execution_time.task_runner import _make_task_span
from elasticflow_airflow.task.telemetry import trace_labels
carrier = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
ti = SimpleNamespace(context_carrier=carrier, task_id="train", dag_id="d", run_id="r", try_number=1, map_index=-1)
with _make_task_span(SimpleNamespace(ti=ti)):
    print(trace_labels()["traceparent"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()[-1]
    assert said.startswith("00-0af7651916cd43dd8448eb211c80319c-")
    assert "b7ad6b7169203331" not in said  # The task's own span, beneath the run's.

"""Sends OpenTelemetry spans for the events of jobs, if a collector is configured.

A span is sent when its activity has ended. Span ids are derived from the job's id, and the parent from the
``traceparent`` of its submission, so that a restarted service continues the same trace. The packages are an extra;
without them, or without a collector, none of them is loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from elasticflow_airflow import __version__
from elasticflow_airflow.api import TRACEPARENT, EventKind
from elasticflow_airflow.service.store.store import Reader
from elasticflow_airflow.service.store.tables import EventRow, GenerationRow, IncarnationRow, JobRow
from elasticflow_airflow.service.telemetry.tallies import ENDS

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_VERDICTS = (EventKind.ADMITTED, EventKind.REJECTED)
_SAMPLED = 1

log = structlog.get_logger()


class Traces(Protocol):
    """A listener of events that sends spans, and flushes them at the end."""

    def __call__(self, reader: Reader, event: EventRow) -> None:
        """Handle an event."""
        ...

    def close(self) -> None:
        """Send the remaining spans."""
        ...


def traces_from_environment(environment: Mapping[str, str] = os.environ) -> Traces | None:
    """Create traces as the standard environment variables say; None if no collector is configured."""
    asked = any(environment.get(name) for name in _ENDPOINTS)
    if not asked or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")
    try:
        exporter = _exporter(protocol)
    except ImportError as error:
        remedy = "pip install 'elasticflow-airflow[otel]', or unset OTEL_EXPORTER_OTLP_ENDPOINT"
        said = "no traces are sent: a collector is configured, but a package is missing"
        log.warning(said, missing=error.name, remedy=remedy)
        return None
    return job_traces(exporter, environment.get("OTEL_SERVICE_NAME") or "elasticflow")


def _exporter(protocol: str) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http()


def job_traces(exporter: SpanExporter, service_name: str = "elasticflow", *, at_once: bool = False) -> Traces:
    """Create traces for an exporter; ``at_once``: send each span as soon as it ends, not in batches."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context

    class GivenIds(IdGenerator):
        """Returns the ids that were set last."""

        trace_id = span_id = 0

        def generate_span_id(self) -> int:
            return self.span_id

        def generate_trace_id(self) -> int:
            return self.trace_id

    class JobTraces:
        """For one thread at a time."""

        def __init__(self) -> None:
            self._ids = GivenIds()
            resource = Resource.create({"service.name": service_name, "service.version": __version__})
            self._provider = TracerProvider(resource=resource, id_generator=self._ids)
            processor = SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter)
            self._provider.add_span_processor(processor)
            self._tracer = self._provider.get_tracer("elasticflow", __version__)
            self._sent: set[tuple[str, int]] = set()
            self._began_at: dict[tuple[str, int], float] = {}

        def __call__(self, reader: Reader, event: EventRow) -> None:
            """Send the spans of the activities that ended with this event."""
            if event.job_id is None or event.incarnation is None:
                return
            job, row = reader.job(event.job_id), reader.incarnation(event.job_id, event.incarnation)
            if job is None or row is None:
                return
            key = (event.job_id, event.incarnation)
            if event.kind == EventKind.SUBMITTED:
                self._began_at[key] = event.at
                self._send(job, row, "submit", row.submitted_at, event.at, {"elasticflow.reason": str(event.reason)})
            if event.kind in _VERDICTS:
                verdict = {"elasticflow.decision": event.kind, "elasticflow.reason": str(event.reason)}
                self._send(job, row, "decide", self._began_at.pop(key, row.submitted_at), event.at, verdict)
            for generation in reader.generations(*key):
                self._tell_generation(job, row, generation)
            if event.kind == EventKind.REJECTED or (event.kind in ENDS and row.terminal):
                self._end(job, row, event)

        def close(self) -> None:
            """Send the remaining spans."""
            self._provider.shutdown()

        def _tell_generation(self, job: JobRow, row: IncarnationRow, generation: GenerationRow) -> None:
            key = (generation.job_id, generation.generation)
            if generation.ended_at is None or generation.holding_at is None or key in self._sent:
                return
            self._sent.add(key)
            about = {
                "elasticflow.generation": generation.generation,
                "elasticflow.workers": generation.workers,
                "elasticflow.slots": [f"{node}:{index}" for node, index in generation.placement],
                "elasticflow.purpose": generation.purpose,
                "elasticflow.mode": generation.mode,
                "elasticflow.reason": str(generation.reason),
                "elasticflow.outcome": generation.outcome or "",
            }
            name = f"generation {generation.generation}"
            self._send(job, row, name, generation.holding_at, generation.ended_at, about)

        def _end(self, job: JobRow, row: IncarnationRow, event: EventRow) -> None:
            key = (row.job_id, -row.incarnation)
            if key in self._sent:
                return
            self._sent.add(key)
            about: dict[str, Any] = {"elasticflow.state": event.kind, "elasticflow.steps": row.step}
            if row.result is not None and row.result.met is not None:
                about["elasticflow.deadline_met"] = row.result.met
                about["elasticflow.slack_s"] = row.result.slack_s or 0.0
            failure = (
                (row.failure or str(event.reason)) if event.kind in (EventKind.FAILED, EventKind.REJECTED) else None
            )
            self._send(job, row, "job", row.submitted_at, event.at, about, failure)

        def _send(
            self,
            job: JobRow,
            row: IncarnationRow,
            name: str,
            began_at: float,
            ended_at: float,
            about: Mapping[str, Any],
            failure: str | None = None,
        ) -> None:
            identity = job.identity
            trace_id, parent_id, flags = _place_of(row)
            job_span = _number(8, row.job_id, row.incarnation, "job")
            above = parent_id if name == "job" else job_span
            context = None
            if above is not None:
                parent = SpanContext(trace_id, above, is_remote=True, trace_flags=TraceFlags(flags))
                context = set_span_in_context(NonRecordingSpan(parent))
            self._ids.trace_id = trace_id
            self._ids.span_id = _number(8, row.job_id, row.incarnation, name)
            attributes = {
                "elasticflow.job_id": row.job_id,
                "elasticflow.incarnation": row.incarnation,
                "airflow.dag_id": identity.dag_id,
                "airflow.task_id": identity.task_id,
                "airflow.dag_run.run_id": identity.run_id,
                **about,
            }
            span = self._tracer.start_span(
                f"elasticflow.{name.split()[0]}", context, attributes=attributes, start_time=int(began_at * 1e9)
            )
            if failure is not None:
                span.set_status(Status(StatusCode.ERROR, failure[:1000]))
            span.end(int(max(began_at, ended_at) * 1e9))

    return JobTraces()


def _place_of(row: IncarnationRow) -> tuple[int, int | None, int]:
    """Return trace id, parent span id and flags: from the submission, or else a trace of the job's own."""
    given = _PARENT.fullmatch(row.submission.labels.get(TRACEPARENT, ""))
    if given is not None and int(given[1], 16) and int(given[2], 16):
        return int(given[1], 16), int(given[2], 16), int(given[3], 16)
    return _number(16, row.job_id, row.incarnation, "trace"), None, _SAMPLED


def _number(size_bytes: int, *parts: object) -> int:
    """Return a deterministic id of ``size_bytes`` bytes for these parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:size_bytes], "big") or 1

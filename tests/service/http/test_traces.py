"""Spans of jobs, from the trace of the Airflow task that submitted them; and the lines of the service's log."""

from __future__ import annotations

import http.server
import threading
import time

import pytest
import structlog

from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.telemetry.event_log_follower import EventLogFollower, write_to_log
from elasticflow_airflow.service.telemetry.traces import job_traces, traces_from_environment

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def told(world):
    """Hear what happens in a world: the exporter with its spans, and a function that tells all until now."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    traces = job_traces(exporter, at_once=True)
    listening = [EventLogFollower(world.store, Notifier(), [traces])]

    def tell():
        listening[0].tell()
        return {span.name: span for span in exporter.get_finished_spans()}

    def again():
        """The service is started again: another process hears the same log."""
        world.restart()
        listening[0] = EventLogFollower(world.store, Notifier(), [job_traces(exporter, at_once=True)])

    return exporter, tell, again


def ids(span):
    parent = None if span.parent is None else f"{span.parent.span_id:016x}"
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", parent


def test_a_job_belongs_to_the_trace_of_its_task(world, told):
    _, tell, _ = told
    labels = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    job = world.submit(steps=100, within=600.0, scaling_curve=CURVE, labels=labels)
    world.ended(job)
    spans = tell()
    assert set(spans) == {"elasticflow.submit", "elasticflow.decide", "elasticflow.generation", "elasticflow.job"}
    trace, job_span, parent = ids(spans["elasticflow.job"])
    assert (trace, parent) == (TRACE, PARENT)
    for name in ("elasticflow.submit", "elasticflow.decide", "elasticflow.generation"):
        assert ids(spans[name])[0] == TRACE
        assert ids(spans[name])[2] == job_span
    assert len({ids(span)[1] for span in spans.values()}) == 4
    whole, part = spans["elasticflow.job"], spans["elasticflow.generation"]
    assert whole.start_time <= part.start_time < part.end_time <= whole.end_time
    assert whole.attributes["airflow.dag_id"] == "daily"
    assert whole.attributes["elasticflow.deadline_met"] is True
    assert part.attributes["elasticflow.workers"] == len(part.attributes["elasticflow.slots"])
    assert part.attributes["elasticflow.reason"]
    assert spans["elasticflow.decide"].attributes["elasticflow.decision"] == "admitted"


def test_without_airflows_trace_a_job_is_a_trace_of_its_own(world, told):
    exporter, tell, _ = told
    world.ended(world.submit(steps=20, within=600.0, scaling_curve=CURVE))
    world.ended(
        world.submit(task="other", steps=20, within=600.0, scaling_curve=CURVE, labels={"traceparent": "rubbish"})
    )
    tell()
    roots = [span for span in exporter.get_finished_spans() if span.name == "elasticflow.job"]
    assert [span.parent for span in roots] == [None, None]
    assert len({span.context.trace_id for span in exporter.get_finished_spans()}) == 2


def test_a_trace_that_is_not_sampled_stays_so(world, told):
    exporter, tell, _ = told
    world.ended(
        world.submit(steps=20, within=600.0, scaling_curve=CURVE, labels={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    )
    tell()
    assert not exporter.get_finished_spans()


def test_a_service_that_starts_again_goes_on_with_the_same_trace(world, told):
    exporter, tell, again = told
    job = world.submit(steps=100, within=600.0, scaling_curve=CURVE)
    world.until(lambda: world.status(job).step > 5, "it trains")
    tell()
    again()
    world.ended(job)
    tell()
    spans = exporter.get_finished_spans()
    assert len({span.context.trace_id for span in spans}) == 1
    names = [span.name for span in spans]
    assert sorted(names) == ["elasticflow.decide", "elasticflow.generation", "elasticflow.job", "elasticflow.submit"]


def test_a_rejection_and_a_failure_are_errors(world, told):
    exporter, tell, _ = told
    world.submit(task="impossible", steps=10**6, within=60.0, scaling_curve=CURVE)
    world.ended(world.submit(task="broken", steps=50, within=600.0, scaling_curve=CURVE, fake={"fail_at_step": 1}))
    world.step()
    tell()
    jobs = {s.attributes["airflow.task_id"]: s for s in exporter.get_finished_spans() if s.name == "elasticflow.job"}
    assert not jobs["impossible"].status.is_ok
    assert not jobs["broken"].status.is_ok
    assert "injected failure" in jobs["broken"].status.description


def test_no_collector_no_traces(monkeypatch):
    assert traces_from_environment({}) is None
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert traces_from_environment({**asked, "OTEL_SDK_DISABLED": "true"}) is None


def test_a_missing_package_is_said_and_harms_nothing(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with structlog.testing.capture_logs() as lines:
        assert traces_from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None
    assert "elasticflow-airflow[otel]" in lines[0]["remedy"]


def test_a_listener_that_fails_keeps_nobody_else_from_hearing(world):
    def fails(_reader, _event):
        raise RuntimeError("no")

    heard = []
    follower = EventLogFollower(world.store, Notifier(), [fails, lambda _reader, event: heard.append(event.kind)])
    world.submit(steps=10)
    with structlog.testing.capture_logs():
        follower.tell()
    assert "submitted" in heard


def test_lines_of_the_log_say_what_they_are_about(world):
    follower = EventLogFollower(world.store, Notifier(), [write_to_log])
    job = world.submit(steps=50, within=600.0, scaling_curve=CURVE)
    world.ended(job)
    with structlog.testing.capture_logs() as lines:
        follower.tell()
    kinds = {line["event"]: line for line in lines}
    assert {"submitted", "admitted", "resized", "started", "succeeded"} <= set(kinds)
    for line in lines:
        assert line["job_id"] == job.job.job_id
        assert line["incarnation"] == 1
    assert kinds["started"]["generation"] == 1
    assert kinds["succeeded"]["log_level"] == "info"


def test_a_real_service_sends_spans_to_a_collector(daemons, open_client, tmp_path, monkeypatch):
    """The whole way: OTLP over HTTP, from the daemon to a collector."""
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
    from elasticflow_airflow.client import snapshot_folder

    got = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            got.append((self.path, messages.ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "Airflow")
        client = open_client(daemons.embedded())
        (tmp_path / "train.py").write_text("print()\n")
        snapshot = snapshot_folder(tmp_path)
        client.upload_snapshot(snapshot)
        client.submit(
            JobSubmission(
                identity=JobIdentity(dag_id="daily", run_id="r", task_id="train"),
                command=Command(snapshot=snapshot.sha256, script="train.py"),
                length=Length(steps=5),
                global_batch_size=8,
                deadline_at=time.time() + 600,
                scaling_curve={1: 10.0},
                labels={"traceparent": f"00-{TRACE}-{PARENT}-01"},
            )
        )

        def names():
            return {
                span.name
                for _, request in list(got)
                for resource in request.resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
                if span.trace_id.hex() == TRACE
            }

        limit = time.monotonic() + 60
        while "elasticflow.job" not in names():
            assert time.monotonic() < limit, names()
            time.sleep(0.1)
        assert names() >= {"elasticflow.submit", "elasticflow.decide", "elasticflow.generation"}
        assert {path for path, _ in got} == {"/v1/traces"}
        about = {a.key: a.value.string_value for a in got[0][1].resource_spans[0].resource.attributes}
        assert about["service.name"] == "elasticflow"
    finally:
        server.shutdown()
        server.server_close()

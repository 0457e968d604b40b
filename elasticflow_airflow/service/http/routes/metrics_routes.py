"""``GET /metrics``: the service in Prometheus' text format.

Counters come from the event log and continue across restarts; gauges are read from the store at each scrape. The route
accepts the token like every other, or ``metrics_token``, which grants access to nothing else.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from elasticflow_airflow import __version__
from elasticflow_airflow.api import API_VERSION, State
from elasticflow_airflow.engines.port import STANDING, GangState
from elasticflow_airflow.runtime.protocol import RescaleMode
from elasticflow_airflow.service.decisions.setting_aside import slots_of
from elasticflow_airflow.service.http.lanes import Lanes
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.requests.capacity_service import CapacityWatch
from elasticflow_airflow.service.store.held_slots import gpu_seconds
from elasticflow_airflow.service.store.store import Reader
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow
from elasticflow_airflow.service.store.views import UNREADABLE
from elasticflow_airflow.service.telemetry.instruments import PROCESS, measure_statements
from elasticflow_airflow.service.telemetry.tallies import ENDS, Tallies, TallyHistogram

_LIVE = [state for state in State if not state.terminal]


def add_metrics(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    """Add the route."""
    measure_statements(parts.store.engine)
    exhibit = MetricsCollector(parts)
    registry = CollectorRegistry()
    registry.register(exhibit)
    ProcessCollector(registry=registry)

    @app.get("/metrics", response_class=PlainTextResponse)
    @lanes.pages
    def metrics() -> Response:
        """Metrics in Prometheus' text format. The metrics token is enough."""
        return Response(generate_latest(registry) + generate_latest(PROCESS), media_type=CONTENT_TYPE_LATEST)


class MetricsCollector:
    """Collects the metrics at each scrape. Thread-safe."""

    def __init__(self, parts: ServiceParts) -> None:
        self._parts = parts
        self._tallies = Tallies()
        self._capacity = None if parts.capacity is None else CapacityWatch(parts.capacity)
        self._lock = threading.Lock()

    def describe(self) -> list[Metric]:
        """Return nothing, so that registration does not read the store."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, from one snapshot of the store; of a follower, only those of the process itself."""
        if not self._parts.decides():
            yield from self._itself()
            return
        with self._lock, self._parts.store.read() as reader:
            self._tallies.catch_up(reader)
            found = reader.undrained()
            rows = [row for _, row in found]
            tasks = {job.job_id: (job.dag_id, job.identity.task_id) for job, _ in found}
            generations = [g for g in reader.open_generations() if g.state in STANDING]
            live_slot_s = _live_slot_s(reader, rows, self._parts.job_service.clock())
            drained, avoided = reader.drains(), reader.avoided()
            yield from self._counted(live_slot_s)
        yield from self._slots(generations, len(drained), len(avoided))
        yield from _jobs(rows, tasks)
        yield from self._needed()
        yield from self._itself()

    def _counted(self, live_slot_s: float) -> Iterator[Metric]:
        t = self._tallies
        yield _counter("admissions", "Jobs admitted, by terms.", "terms", t.admitted, _TERMS)
        rejected = t.ended["rejected"]
        yield CounterMetricFamily("elasticflow_rejections", "Jobs that admission control refused.", value=rejected)
        yield _counter("jobs_ended", "Jobs that came to their end, by state.", "state", t.ended, ENDS)
        said = "Ends of jobs that had a deadline, cancelled ones apart."
        yield _counter("deadlines", said, "outcome", t.deadlines, ("met", "missed"))
        yield _histogram("lateness_seconds", "How late successes came that missed their deadline.", t.lateness)
        yield _histogram("spare_seconds", "How long before their deadline successes came.", t.spare)
        yield _histogram("start_wait_seconds", "From the submission of a job to its first workers.", t.waits)
        yield _histogram("rescale_pause_seconds", "How long training stood still for a change in place.", t.pauses)
        modes = tuple(mode.value for mode in RescaleMode)
        yield _counter("rescales", "Changes of a job's workers that were ordered.", "mode", t.changes, modes)
        yield _counter("events", "Rows of the event log, by kind.", "kind", t.kinds, ())
        held = t.slot_s + live_slot_s
        yield CounterMetricFamily("elasticflow_slot_seconds", "Slots held, times how long.", value=held)

    def _slots(self, generations: list[GenerationRow], draining: int, avoided: int) -> Iterator[Metric]:
        nodes = self._parts.nodes()
        held = {slot for g in generations for slot in slots_of(g)}
        computing = {slot for g in generations if g.state == GangState.RUNNING for slot in slots_of(g)}
        slots = GaugeMetricFamily(
            "elasticflow_slots",
            "Slots: total, held by jobs, computing (held by workers that train), busy with something else, avoided.",
            labels=["state"],
        )
        total = sum(node.slots for node in nodes)
        numbers = {"total": total, "held": len(held), "computing": len(computing), "avoided": avoided}
        for state, number in {**numbers, "busy": sum(len(node.busy) for node in nodes)}.items():
            slots.add_metric([state], number)
        yield slots
        yield GaugeMetricFamily("elasticflow_nodes", "Nodes that the service sees.", value=len(nodes))
        yield GaugeMetricFamily("elasticflow_nodes_draining", "Nodes that are going away.", value=draining)

    def _needed(self) -> Iterator[Metric]:
        """Yield nothing while capacity is unknown, and no wanted slots if no number of further nodes would suffice."""
        found = None if self._capacity is None else self._capacity.look()
        if found is None:
            return
        said = "Slots of whole nodes that nobody needs in the next 24 hours."
        yield GaugeMetricFamily("elasticflow_releasable_slots", said, value=found.releasable_slots)
        if found.wanted_slots is not None:
            said = "Slots of further nodes that would be enough for all jobs that want capacity."
            yield GaugeMetricFamily("elasticflow_wanted_slots", said, value=found.wanted_slots)

    def _itself(self) -> Iterator[Metric]:
        parts = self._parts
        info = GaugeMetricFamily("elasticflow_build_info", "Versions.", labels=["version", "api", "engine", "policy"])
        info.add_metric([__version__, API_VERSION, parts.engine_name, parts.settings.policy], 1)
        yield info
        healthy = not parts.problems()
        yield GaugeMetricFamily("elasticflow_healthy", "1 while the service has no problem.", value=healthy)
        yield GaugeMetricFamily("elasticflow_leader", "1 where the scheduling loop runs.", value=parts.decides())
        view = None if parts.replicas is None else parts.replicas.view
        if view is not None:
            said = "Number of the leader, which grows with each change of it."
            yield GaugeMetricFamily("elasticflow_leader_epoch", said, value=view.epoch)
            said = "When a silent leader was last replaced, in UTC seconds; 0: never."
            yield GaugeMetricFamily("elasticflow_failed_over_timestamp_seconds", said, value=view.failed_over_at or 0.0)
        free = shutil.disk_usage(parts.settings.state_dir).free
        yield GaugeMetricFamily("elasticflow_state_free_bytes", "Room left for checkpoints and state.", value=free)


_TERMS = ("deadline", "best_effort", "renegotiated")


def _jobs(rows: Iterable[IncarnationRow], tasks: dict[str, tuple[str, str]]) -> Iterator[Metric]:
    live = [row for row in rows if not row.terminal]
    states = Counter(row.state for row in live)
    by_state = GaugeMetricFamily("elasticflow_jobs", "Jobs that are not over, by state.", labels=["state"])
    for state in _LIVE:
        by_state.add_metric([state.value], states[state.value])
    yield by_state
    queued = sum(states[state] for state in (State.SUBMITTED, State.WAITING, State.PROFILING, State.ADMITTED))
    yield GaugeMetricFamily("elasticflow_queue_jobs", "Jobs that have not begun to train in earnest.", value=queued)
    at_risk = sum(row.at_risk for row in live)
    yield GaugeMetricFamily("elasticflow_jobs_at_risk", "Promised jobs that are not on course.", value=at_risk)
    slack = GaugeMetricFamily(
        "elasticflow_slack_seconds",
        "Deadline minus projected finish of a task's live job; below 0: late. The least, where there are several.",
        labels=["dag_id", "task_id"],
    )
    least: dict[tuple[str, str], float] = {}
    for row in live:
        if row.deadline_at is not None and row.projected_finish_at is not None:
            task, slack_s = tasks[row.job_id], row.deadline_at - row.projected_finish_at
            least[task] = min(slack_s, least.get(task, slack_s))
    for task, slack_s in sorted(least.items()):
        slack.add_metric(list(task), slack_s)
    yield slack


def _live_slot_s(reader: Reader, rows: Iterable[IncarnationRow], now: float) -> float:
    seconds = 0.0
    for row in rows:
        if not row.terminal:
            with suppress(*UNREADABLE):
                seconds += gpu_seconds(reader.generations(row.job_id, row.incarnation), now)
    return seconds


def _counter(name: str, said: str, label: str, counts: Counter[str], known: Iterable[str]) -> Metric:
    """Return a counter with a label; ``known`` values start at 0, so that their first increase is visible."""
    family = CounterMetricFamily(f"elasticflow_{name}", said, labels=[label])
    for value in sorted({*known, *counts}):
        family.add_metric([value], counts[value])
    return family


def _histogram(name: str, said: str, spread: TallyHistogram) -> Metric:
    return HistogramMetricFamily(f"elasticflow_{name}", said, buckets=spread.buckets(), sum_value=spread.total)

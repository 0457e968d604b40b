"""Assembles the parts of a service around an engine; contains none of their rules."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from elasticflow_airflow.engines.port import Engine
from elasticflow_airflow.service.autoscaling import CAPACITY_REST_S, Autoscaling
from elasticflow_airflow.service.decisions.session_settings import trained_with
from elasticflow_airflow.service.http.parts import InsightServices, ServiceParts, Traffic
from elasticflow_airflow.service.job_files.candidates import CandidateService
from elasticflow_airflow.service.job_files.snapshots import Snapshots
from elasticflow_airflow.service.leadership.replicas import Replicas
from elasticflow_airflow.service.leadership.shared_key import agree_on_key, forget_lost_key
from elasticflow_airflow.service.leadership.tenure import Seat, Tenure
from elasticflow_airflow.service.loop.reconcile import Reconciler
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.requests.capacity_service import CapacityService, CapacityWatch
from elasticflow_airflow.service.requests.forecasting import ForecastService
from elasticflow_airflow.service.requests.insight_service import InsightService
from elasticflow_airflow.service.requests.job_service import JobService
from elasticflow_airflow.service.requests.timetable_intake import CalendarService
from elasticflow_airflow.service.requests.whatif import WhatIfService
from elasticflow_airflow.service.secrets import SecretBox
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.snapshot_archives import SnapshotArchives
from elasticflow_airflow.service.store.store import Store

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Assembly:
    """What all parts of a service share. ``clock`` returns UTC seconds, ``monotonic`` seconds that never jump."""

    settings: ServiceSettings
    store: Store
    notifier: Notifier
    seat: Seat
    snapshots: Snapshots
    secrets: SecretBox
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic

    @classmethod
    def of(
        cls,
        settings: ServiceSettings,
        store: Store,
        notifier: Notifier,
        seat: Seat,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Assembly:
        """Return it with the code and the key that all services on the database share, or those in the state directory.

        Raises OtherKeyError when the services on a shared database have another key, and SecretError or ValueError
        when the own key cannot be read.
        """
        snapshots = Snapshots(
            settings.state_dir / "snapshots",
            max_bytes=settings.snapshot_max_bytes,
            max_files=settings.snapshot_max_files,
            archives=SnapshotArchives(store) if store.is_shared else None,
        )
        secrets = SecretBox(settings.state_dir / "secret.key", settings.read_secret_keys())
        if store.is_shared:
            forget_lost_key(store, secrets)
            agree_on_key(store, secrets)
        return cls(settings, store, notifier, seat, snapshots, secrets, clock, monotonic)

    def tenure(self, engine: Engine, store: Store, begins: str = "the service has started") -> Tenure:
        """Return the loop over an engine, not started yet. ``store``: one that checks whether it may decide."""
        candidates = CandidateService(engine.files, self.notifier.wake)
        reconciler = Reconciler(
            store,
            engine,
            self.settings,
            self.notifier,
            self.snapshots,
            self.secrets,
            candidates,
            clock=self.clock,
            monotonic=self.monotonic,
            renewals=self.seat.renewals,
            begins=begins,
        )
        return Tenure(engine, reconciler, candidates, self._autoscaling(engine))

    def parts(self, replicas: Replicas | None = None) -> ServiceParts:
        """Return what the routes of the HTTP API use. The caller closes the store."""
        seat, store, settings = self.seat, self.store, self.settings
        forecasts = self._forecasts()

        def problems() -> list[str]:
            return [*seat.problems(), *([] if replicas is None else replicas.problems())]

        return ServiceParts(
            store=store,
            notifier=self.notifier,
            snapshots=self.snapshots,
            engine=lambda: seat.engine,
            engine_name=settings.engine,
            job_service=JobService(
                store,
                self.notifier,
                self.snapshots,
                self.secrets,
                settings,
                seat.has_files,
                slots=lambda: sum(node.slots for node in seat.nodes()),
                clock=self.clock,
                renewals=seat.renewals,
                hears_renewals=lambda: seat.is_filled,
            ),
            settings=settings,
            nodes=seat.nodes,
            problems=problems,
            traffic=Traffic(),
            started_at=self.clock(),
            forecasts=forecasts,
            insight=InsightServices(
                InsightService(
                    store,
                    seat.foresee,
                    seat.nodes,
                    lambda row, generations: trained_with(
                        row, generations, settings, self.snapshots, seat.engine.files
                    ),
                    clock=self.clock,
                ),
                WhatIfService(forecasts),
                CalendarService(store, settings, seat.hear_of_runs, clock=self.clock),
            ),
            capacity=CapacityService(forecasts),
            replicas=replicas,
            decides=lambda: seat.is_filled and (replicas is None or replicas.role == "leader"),
        )

    def _forecasts(self) -> ForecastService:
        seat = self.seat
        return ForecastService(self.store, self.settings, seat.copy_scheduler, seat.device_type, clock=self.clock)

    def _autoscaling(self, engine: Engine) -> Autoscaling | None:
        hours = self.settings.ray_autoscale_hours
        if hours is None:
            return None
        if self.settings.engine != "ray":
            log.warning("ELASTICFLOW_RAY_AUTOSCALE_HOURS is set: it is ignored, since the engine is not ray")
            return None
        watch = CapacityWatch(CapacityService(self._forecasts()), hours=hours, rest_s=CAPACITY_REST_S)
        return Autoscaling(
            lambda: watch.look(0.0), self.seat.nodes, engine.want_nodes, unneeded_s=self.settings.ray_unneeded_s
        )


def assemble(
    settings: ServiceSettings,
    engine: Engine,
    notifier: Notifier,
    *,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> tuple[ServiceParts, Reconciler, CandidateService]:
    """Assemble the service around an engine in this process, for callers with their own clock.

    The caller runs the loop, and closes the candidate service, the engine and the store.
    """
    seat = Seat()
    assembly = Assembly.of(
        settings, Store(settings.store_url(), clock=clock), notifier, seat, clock=clock, monotonic=monotonic
    )
    tenure = assembly.tenure(engine, assembly.store)
    seat.fill(tenure)
    return assembly.parts(), tenure.reconciler, tenure.candidates

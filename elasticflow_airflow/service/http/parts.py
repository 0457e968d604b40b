"""The parts of a running service that the routes of the HTTP API use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticflow_airflow.engines.port import Engine, EngineNode
from elasticflow_airflow.service.job_files.snapshots import Snapshots
from elasticflow_airflow.service.leadership.replicas import Replicas
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.requests.capacity_service import CapacityService
from elasticflow_airflow.service.requests.forecasting import ForecastService
from elasticflow_airflow.service.requests.insight_service import InsightService
from elasticflow_airflow.service.requests.job_service import JobService
from elasticflow_airflow.service.requests.timetable_intake import CalendarService
from elasticflow_airflow.service.requests.whatif import WhatIfService
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.store import Store


@dataclass(frozen=True, slots=True)
class InsightServices:
    """The services behind the requests of the pages."""

    insight: InsightService
    what_if: WhatIfService
    calendar: CalendarService


@dataclass(slots=True)
class Traffic:
    """The time of the last request, and the number of requests in progress."""

    last_monotonic_s: float = field(default_factory=time.monotonic)
    under_way: int = 0


@dataclass(frozen=True, slots=True)
class ServiceParts:
    """Everything that the routes use. ``nodes`` and ``problems`` query the loop.

    ``engine`` raises Refusal 503 where this process does not decide. ``replicas``: None where there can be one only.
    """

    store: Store
    notifier: Notifier
    snapshots: Snapshots
    engine: Callable[[], Engine]
    engine_name: str
    job_service: JobService
    settings: ServiceSettings
    nodes: Callable[[], tuple[EngineNode, ...]]
    problems: Callable[[], list[str]]
    traffic: Traffic
    started_at: float
    forecasts: ForecastService | None = None
    insight: InsightServices | None = None
    capacity: CapacityService | None = None
    replicas: Replicas | None = None
    decides: Callable[[], bool] = lambda: True
    """Whether the loop runs in this process now."""

"""The service's real API over a store that tests fill by hand: nothing is scheduled, and nothing runs.

``QuietService`` takes requests as the handler of an ``httpx.MockTransport``, for clients of both kinds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
from starlette.testclient import TestClient

from elasticflow_airflow.api import JobIdentity
from elasticflow_airflow.engines.fake.engine import FakeEngine, fake_nodes
from elasticflow_airflow.service.http.app import build_app
from elasticflow_airflow.service.http.parts import ServiceParts, Traffic
from elasticflow_airflow.service.job_files.snapshots import Snapshots
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.requests.forecasting import ForecastService
from elasticflow_airflow.service.requests.job_service import JobService
from elasticflow_airflow.service.secrets import SecretBox
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.store import Store
from elasticflow_airflow.service.store.tables import IncarnationRow, JobRow
from support.stored import incarnation_columns


class QuietService:
    """A service of one node with four slots, with its state in ``folder``."""

    def __init__(self, folder: Path) -> None:
        settings = ServiceSettings(state_dir=folder, verdict_wait_s=0.01)
        self.store, notifier = Store(f"sqlite:///{folder / 'quiet.db'}"), Notifier()
        snapshots = Snapshots(
            folder / "snapshots", max_bytes=settings.snapshot_max_bytes, max_files=settings.snapshot_max_files
        )
        secrets = SecretBox(folder / "secret.key")
        self.engine = FakeEngine(fake_nodes(1, 4), folder / "jobs")

        def nobody_plans() -> Any:
            raise AssertionError("nothing is scheduled here")

        self.app = build_app(
            ServiceParts(
                store=self.store,
                notifier=notifier,
                snapshots=snapshots,
                engine=lambda: self.engine,
                engine_name=self.engine.name,
                job_service=JobService(
                    self.store,
                    notifier,
                    snapshots,
                    secrets,
                    settings,
                    self.engine.files.exists,
                    slots=lambda: 4,
                    clock=time.time,
                ),
                settings=settings,
                nodes=lambda: (),
                problems=list,
                traffic=Traffic(),
                started_at=0.0,
                forecasts=ForecastService(self.store, settings, nobody_plans, lambda: "", clock=time.time),
            ),
            token=None,
        )
        self._api = TestClient(self.app, base_url="http://service")

    def add(self, *identities: JobIdentity, submitted_at: float = 0.0, **columns: Any) -> None:
        """Have jobs, each submitted a second after the one before."""
        with self.store.write() as tx:
            for n, identity in enumerate(identities):
                job_id, at = identity.job_id, submitted_at + n
                tx.add(
                    JobRow(
                        job_id=job_id,
                        identity=identity,
                        recurring_key=identity.recurring_key,
                        dag_id=identity.dag_id,
                        claim=1,
                        incarnation=1,
                        generation=0,
                        created_at=at,
                    )
                )
                tx.session.flush()
                values = incarnation_columns(identity)
                tx.add(IncarnationRow(job_id=job_id, incarnation=1, submitted_at=at, **{**values, **columns}))

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Answer a request."""
        path = str(request.url.copy_with(scheme="http", host="service", port=None))
        answer = self._api.request(request.method, path, content=request.content, headers=dict(request.headers))
        return httpx.Response(answer.status_code, content=answer.content)

    def close(self) -> None:
        """Nothing stays open."""
        self.engine.close()
        self.store.close()

"""Clients of the elasticflow service (sync and async), the starter of the embedded service, and code snapshots.

May not import Airflow, torch or anything of the service: it is used by Airflow workers, by the triggerer and by the
command line.
"""

from __future__ import annotations

from elasticflow_airflow.client.async_client import AsyncElasticFlowClient
from elasticflow_airflow.client.embedded import default_state_dir, ensure_service, for_looking
from elasticflow_airflow.client.endpoint import Endpoint
from elasticflow_airflow.client.errors import (
    PASSING,
    ElasticFlowError,
    EmbeddedStartError,
    IncompatibleService,
    InvalidSubmission,
    JobNotFound,
    NotRunning,
    RequestRefused,
    ServiceFault,
    ServiceUnavailable,
    SnapshotError,
    StaleClaim,
    Unauthorized,
)
from elasticflow_airflow.client.snapshot import Snapshot, snapshot_folder, snapshot_module, snapshot_script
from elasticflow_airflow.client.sync_client import ElasticFlowClient

__all__ = [
    "PASSING",
    "AsyncElasticFlowClient",
    "ElasticFlowClient",
    "ElasticFlowError",
    "EmbeddedStartError",
    "Endpoint",
    "IncompatibleService",
    "InvalidSubmission",
    "JobNotFound",
    "NotRunning",
    "RequestRefused",
    "ServiceFault",
    "ServiceUnavailable",
    "Snapshot",
    "SnapshotError",
    "StaleClaim",
    "Unauthorized",
    "default_state_dir",
    "ensure_service",
    "for_looking",
    "snapshot_folder",
    "snapshot_module",
    "snapshot_script",
]

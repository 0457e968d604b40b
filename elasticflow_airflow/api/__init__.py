"""The messages of the HTTP API, shared by the service and its clients. Times are float UTC seconds since the epoch.

May import nothing but pydantic: it is used by Airflow workers (no torch) and by services without Airflow.
"""

from __future__ import annotations

from elasticflow_airflow.api.base import (
    API_HEADER,
    API_VERSION,
    IDEMPOTENCY_HEADER,
    TRACEPARENT,
    VERSION_HEADER,
    Problem,
    Wire,
)
from elasticflow_airflow.api.event_kinds import EventKind
from elasticflow_airflow.api.forecast import (
    ForecastAnswer,
    ForecastItem,
    ForecastRequest,
    PlannedRun,
)
from elasticflow_airflow.api.service_card import ServiceCard
from elasticflow_airflow.api.status import (
    AmendAnswer,
    AmendRequest,
    Attachment,
    AttachRequest,
    ClaimRequest,
    Drain,
    DrainRequest,
    DryRun,
    Event,
    Health,
    JobResult,
    JobStatus,
    LeaderStatus,
    LogPiece,
    ReplicaStatus,
    SlotStatus,
    State,
    Verdict,
)
from elasticflow_airflow.api.submission import (
    Command,
    Consistency,
    JobIdentity,
    JobSubmission,
    Length,
    OnMiss,
    OnReject,
    largest_share,
    share_problem,
    target_problem,
)

__all__ = [
    "API_HEADER",
    "API_VERSION",
    "IDEMPOTENCY_HEADER",
    "TRACEPARENT",
    "VERSION_HEADER",
    "AmendAnswer",
    "AmendRequest",
    "AttachRequest",
    "Attachment",
    "ClaimRequest",
    "Command",
    "Consistency",
    "Drain",
    "DrainRequest",
    "DryRun",
    "Event",
    "EventKind",
    "ForecastAnswer",
    "ForecastItem",
    "ForecastRequest",
    "Health",
    "JobIdentity",
    "JobResult",
    "JobStatus",
    "JobSubmission",
    "LeaderStatus",
    "Length",
    "LogPiece",
    "OnMiss",
    "OnReject",
    "PlannedRun",
    "Problem",
    "ReplicaStatus",
    "ServiceCard",
    "SlotStatus",
    "State",
    "Verdict",
    "Wire",
    "largest_share",
    "share_problem",
    "target_problem",
]

"""The service's insight routes as calls: what the page asks beyond what the client's own calls ask."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter

from elasticflow_airflow.client.calls import Call
from elasticflow_airflow.insight import (
    ClusterHistory,
    ClusterNow,
    JobStory,
    RunOfTask,
    StackDump,
    WhatIf,
    WhatIfRequest,
)

M = TypeVar("M", bound=BaseModel)
_RUNS = TypeAdapter(list[RunOfTask])
_SLOW_S = 60.0
"""A dry run plans the whole cluster anew."""


def cluster() -> Call[ClusterNow]:
    """Every slot and every live job."""
    return Call(method="GET", path="/v1/cluster", read=lambda r: ClusterNow.model_validate_json(r.content))


def history(from_at: float, until_at: float, parts: int) -> Call[ClusterHistory]:
    """What was and what is planned between two moments."""
    return Call(
        method="GET",
        path="/v1/cluster/history",
        params={"from_at": from_at, "until_at": until_at, "parts": parts},
        read=lambda r: ClusterHistory.model_validate_json(r.content),
        timeout_s=_SLOW_S,
    )


def story(job_id: str, incarnation: int | None = None) -> Call[JobStory]:
    """Everything about one incarnation of a job."""
    params: dict[str, str | int | float] = {} if incarnation is None else {"incarnation": incarnation}
    path = f"/v1/jobs/{quote(job_id, safe='')}/story"
    return Call(method="GET", path=path, params=params, read=lambda r: JobStory.model_validate_json(r.content))


def runs(job_id: str, limit: int) -> Call[list[RunOfTask]]:
    """This run of a recurring task and the last ones."""
    path = f"/v1/jobs/{quote(job_id, safe='')}/runs"
    return Call(method="GET", path=path, params={"limit": limit}, read=lambda r: _RUNS.validate_json(r.content))


def what_if(request: WhatIfRequest) -> Call[WhatIf]:
    """The outlook with other deadlines or another cluster; nothing is changed."""
    return Call(
        method="POST",
        path="/v1/what-if",
        body=request.model_dump_json().encode(),
        read=lambda r: WhatIf.model_validate_json(r.content),
        timeout_s=_SLOW_S,
    )


def stacks(job_id: str) -> Call[StackDump]:
    """What each worker of a job is doing."""
    path = f"/v1/jobs/{quote(job_id, safe='')}/stacks"
    return Call(
        method="POST", path=path, body=b"{}", read=lambda r: StackDump.model_validate_json(r.content), timeout_s=_SLOW_S
    )

"""The calls of ``elasticflow_airflow.insight`` as values, like those of ``calls``: what the pages ask."""

from __future__ import annotations

from pydantic import TypeAdapter

from elasticflow_airflow.client.calls import Call, job_path, reader
from elasticflow_airflow.insight import (
    CalendarAnswer,
    CalendarRequest,
    CapacityAnswer,
    ClusterHistory,
    ClusterNow,
    JobStory,
    RunOfTask,
    StackDump,
    WhatIf,
    WhatIfRequest,
)

_THINKING_S = 60.0
"""Limit of what the service may have to plan for first."""
_RUNS = TypeAdapter(list[RunOfTask])


def cluster() -> Call[ClusterNow]:
    """Ask for every slot and all live jobs."""
    return Call(method="GET", path="/v1/cluster", read=reader(ClusterNow))


def history(from_at: float | None = None, until_at: float | None = None, parts: int = 96) -> Call[ClusterHistory]:
    """Ask what was, what is planned and what was asked for between two moments (UTC seconds)."""
    wanted: dict[str, float | int | None] = {"from_at": from_at, "until_at": until_at, "parts": parts}
    params = {name: value for name, value in wanted.items() if value is not None}
    return Call(method="GET", path="/v1/cluster/history", params=params, read=reader(ClusterHistory))


def story(job_id: str, incarnation: int | None = None) -> Call[JobStory]:
    """Ask for everything about one incarnation of a job."""
    params = {} if incarnation is None else {"incarnation": incarnation}
    return Call(method="GET", path=f"{job_path(job_id)}/story", params=params, read=reader(JobStory))


def runs(job_id: str, limit: int = 10) -> Call[list[RunOfTask]]:
    """Ask for a run and the last others of the same recurring task."""
    return Call(
        method="GET",
        path=f"{job_path(job_id)}/runs",
        params={"limit": limit},
        read=lambda response: _RUNS.validate_json(response.content, extra="ignore"),
    )


def what_if(request: WhatIfRequest) -> Call[WhatIf]:
    """Ask for the outlook with other deadlines, or with more or fewer nodes."""
    body = request.model_dump_json().encode()
    return Call(method="POST", path="/v1/what-if", read=reader(WhatIf), body=body, timeout_s=_THINKING_S)


def capacity(hours: float = 24.0) -> Call[CapacityAnswer]:
    """Ask which nodes nobody needs in the next hours, or how many more are wanted."""
    path, params = "/v1/capacity", {"hours": hours}
    return Call(method="GET", path=path, params=params, read=reader(CapacityAnswer), timeout_s=_THINKING_S)


def feed_calendar(request: CalendarRequest) -> Call[CalendarAnswer]:
    """Say when the runs of recurring tasks are due."""
    body = request.model_dump_json().encode()
    return Call(method="POST", path="/v1/calendar", read=reader(CalendarAnswer), body=body, timeout_s=_THINKING_S)


def stacks(job_id: str) -> Call[StackDump]:
    """Ask what each worker of a job is doing right now."""
    return Call(method="POST", path=f"{job_path(job_id)}/stacks", read=reader(StackDump), timeout_s=_THINKING_S)

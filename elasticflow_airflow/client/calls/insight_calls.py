"""The calls of ``elasticflow_airflow.api.insight``, which the pages use."""

from __future__ import annotations

from elasticflow_airflow.api.insight import (
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
from elasticflow_airflow.client.calls.call import Call, job_path, list_reader, reader, service_method

_THINKING_S = 60.0
"""Timeout of calls for which the service may have to plan first."""
_read_runs = list_reader(RunOfTask)


class InsightCalls:
    """Builds each of these calls from the arguments of its method."""

    @service_method
    def cluster(self) -> Call[ClusterNow]:
        """Return every slot with its holder, and all live jobs, each with the reason for its size or its waiting."""
        return Call(method="GET", path="/v1/cluster", read=reader(ClusterNow))

    @service_method
    def history(
        self, from_at: float | None = None, until_at: float | None = None, parts: int = 96
    ) -> Call[ClusterHistory]:
        """Return past and planned allocations and the submissions between two times; default: a day around now."""
        wanted: dict[str, float | int | None] = {"from_at": from_at, "until_at": until_at, "parts": parts}
        params = {name: value for name, value in wanted.items() if value is not None}
        return Call(method="GET", path="/v1/cluster/history", params=params, read=reader(ClusterHistory))

    @service_method
    def story(self, job_id: str, incarnation: int | None = None) -> Call[JobStory]:
        """Return everything about one incarnation of a job, by default the current one. Raises JobNotFound."""
        params = {} if incarnation is None else {"incarnation": incarnation}
        return Call(method="GET", path=f"{job_path(job_id)}/story", params=params, read=reader(JobStory))

    @service_method
    def runs(self, job_id: str, limit: int = 10) -> Call[list[RunOfTask]]:
        """Return a run and the latest others of the same recurring task, newest first. Raises JobNotFound."""
        return Call(method="GET", path=f"{job_path(job_id)}/runs", params={"limit": limit}, read=_read_runs)

    @service_method
    def what_if(self, request: WhatIfRequest) -> Call[WhatIf]:
        """Return the forecast with other deadlines, or with more or fewer nodes; nothing is changed."""
        body = request.model_dump_json().encode()
        return Call(method="POST", path="/v1/what-if", read=reader(WhatIf), body=body, timeout_s=_THINKING_S)

    @service_method
    def capacity(self, hours: float = 24.0) -> Call[CapacityAnswer]:
        """Return the nodes that no job needs in the next hours, or how many more are needed; nothing is changed."""
        path, params = "/v1/capacity", {"hours": hours}
        return Call(method="GET", path=path, params=params, read=reader(CapacityAnswer), timeout_s=_THINKING_S)

    @service_method
    def feed_calendar(self, request: CalendarRequest) -> Call[CalendarAnswer]:
        """Report when the runs of recurring tasks are due, so that slots are kept free for them."""
        body = request.model_dump_json().encode()
        return Call(method="POST", path="/v1/calendar", read=reader(CalendarAnswer), body=body, timeout_s=_THINKING_S)

    @service_method
    def stacks(self, job_id: str) -> Call[StackDump]:
        """Return the current stack of each worker of a job. Raises JobNotFound."""
        path = f"{job_path(job_id)}/stacks"
        return Call(method="POST", path=path, read=reader(StackDump), timeout_s=_THINKING_S)

"""The calls about who owns which job as values, like those of ``calls``."""

from __future__ import annotations

from pydantic import TypeAdapter

from elasticflow_airflow.client.calls import Call, Param, reader
from elasticflow_airflow.wire.owners import OwnedJobs, OwnersAnswer, OwnersReport, UnownedJob

_UNOWNED = TypeAdapter(list[UnownedJob])


def owned_jobs(namespace: str, after: str = "") -> Call[OwnedJobs]:
    """Ask for the live jobs of a namespace with an id greater than ``after``."""
    params: dict[str, Param] = {"namespace": namespace, **({"after": after} if after else {})}
    return Call(method="GET", path="/v1/owners", params=params, read=reader(OwnedJobs))


def report_owners(report: OwnersReport) -> Call[OwnersAnswer]:
    """Say what has become of the owners of jobs."""
    body = report.model_dump_json().encode()
    return Call(method="POST", path="/v1/owners", read=reader(OwnersAnswer), body=body)


def unowned_jobs(silent_s: float | None = None) -> Call[list[UnownedJob]]:
    """Ask for the live jobs that nobody seems to want."""
    return Call(
        method="GET",
        path="/v1/unowned",
        params={} if silent_s is None else {"silent_s": silent_s},
        read=lambda response: _UNOWNED.validate_json(response.content, extra="ignore"),
    )

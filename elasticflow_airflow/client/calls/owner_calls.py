"""The calls for the ownership of jobs."""

from __future__ import annotations

from elasticflow_airflow.api.owners import OwnedJobs, OwnersAnswer, OwnersReport, UnownedJob
from elasticflow_airflow.client.calls.call import Call, Param, list_reader, reader, service_method

_read_unowned = list_reader(UnownedJob)


class OwnerCalls:
    """Builds each of these calls from the arguments of its method."""

    @service_method
    def owned_jobs(self, namespace: str, after: str = "") -> Call[OwnedJobs]:
        """Return a page of the live jobs of a namespace with their claims: those with an id greater than ``after``."""
        params: dict[str, Param] = {"namespace": namespace, **({"after": after} if after else {})}
        return Call(method="GET", path="/v1/owners", params=params, read=reader(OwnedJobs))

    @service_method
    def report_owners(self, report: OwnersReport) -> Call[OwnersAnswer]:
        """Report the status of the task instances that own jobs; jobs whose owner is gone are cancelled."""
        body = report.model_dump_json().encode()
        return Call(method="POST", path="/v1/owners", read=reader(OwnersAnswer), body=body)

    @service_method
    def unowned_jobs(self, silent_s: float | None = None) -> Call[list[UnownedJob]]:
        """Return live jobs whose owner is gone, or that no client polled for ``silent_s`` seconds (default 60)."""
        params = {} if silent_s is None else {"silent_s": silent_s}
        return Call(method="GET", path="/v1/unowned", params=params, read=_read_unowned)

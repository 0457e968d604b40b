"""The calls about who owns which job."""

from __future__ import annotations

from elasticflow_airflow.api.owners import OwnedJobs, OwnersAnswer, OwnersReport, UnownedJob
from elasticflow_airflow.client.calls.call import Call, Param, list_reader, reader, service_method

_read_unowned = list_reader(UnownedJob)


class OwnerCalls:
    """How each of these calls is built from the arguments of its method."""

    @service_method
    def owned_jobs(self, namespace: str, after: str = "") -> Call[OwnedJobs]:
        """The live jobs of a namespace with their claims: those with an id greater than ``after``, a page of them."""
        params: dict[str, Param] = {"namespace": namespace, **({"after": after} if after else {})}
        return Call(method="GET", path="/v1/owners", params=params, read=reader(OwnedJobs))

    @service_method
    def report_owners(self, report: OwnersReport) -> Call[OwnersAnswer]:
        """Say what has become of the task instances of jobs: those of owners that are gone are cancelled."""
        body = report.model_dump_json().encode()
        return Call(method="POST", path="/v1/owners", read=reader(OwnersAnswer), body=body)

    @service_method
    def unowned_jobs(self, silent_s: float | None = None) -> Call[list[UnownedJob]]:
        """Live jobs whose owner is gone, or for which nobody has asked for so many seconds (by default 60)."""
        params = {} if silent_s is None else {"silent_s": silent_s}
        return Call(method="GET", path="/v1/unowned", params=params, read=_read_unowned)

"""What an elastic task reads and writes, for OpenLineage: the checkpoint that it begins with, and the one it leaves.

The packages of OpenLineage are imported only when its provider asks, so nobody else needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from airflow.sdk import Asset

_TOLD = ("job_id", "verdict", "deadline", "finished_at", "met", "slack_s", "steps", "final_loss", "gpu_seconds")


class ReportsLineage:
    """What OpenLineage's provider asks an operator, which keeps its result in ``_result`` once there is one."""

    init_from: Any
    inlets: Any
    outlets: Any
    _result: dict[str, Any] | None

    def get_openlineage_facets_on_start(self) -> Any:
        """Tell what is read."""
        return facets(init_from=self.init_from, result=None, inlets=self.inlets, outlets=self.outlets)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:  # noqa: ARG002 - its provider's signature
        """Tell what was read, and the checkpoint that was written."""
        return facets(init_from=self.init_from, result=self._result, inlets=self.inlets, outlets=self.outlets)

    def get_openlineage_facets_on_failure(self, task_instance: Any) -> Any:
        """Tell what was read; of a training that failed nothing is used."""
        return self.get_openlineage_facets_on_complete(task_instance)


def facets(*, init_from: Any, result: Mapping[str, Any] | None, inlets: Iterable[Any], outlets: Iterable[Any]) -> Any:
    """Say what one execution read and wrote, as OpenLineage's OperatorLineage. ``result`` is the task's, if it has one.

    Inputs: the inlets, and the checkpoint of ``init_from`` (not ``"latest"``, which is no place). Outputs: the outlets,
    and the checkpoint with the digest of its weights as its version. A run facet ``elasticflow`` tells how it went.
    """
    lineage = import_module("airflow.providers.openlineage.extractors").OperatorLineage
    inputs, outputs = _labelled(inlets), _labelled(outlets)
    if isinstance(init_from, str) and init_from not in ("", "latest"):
        inputs.append(_dataset(init_from))
    if result is None or result.get("checkpoint_path") is None:
        return lineage(inputs=inputs, outputs=outputs)
    outputs.append(_dataset(str(result["checkpoint_path"]), result.get("checkpoint_digest")))
    return lineage(inputs=inputs, outputs=outputs, run_facets={"elasticflow": _run_facet(result)})


def _labelled(lets: Iterable[Any]) -> list[Any]:
    """Convert inlets or outlets: as their providers would have it, else by the address itself."""
    convert = import_module("airflow.providers.openlineage.extractors.manager").ExtractorManager.convert_to_ol_dataset
    found = []
    for one in lets:
        dataset = convert(one)
        if dataset is None and isinstance(one, Asset) and urlsplit(one.uri).scheme:
            dataset = _dataset(one.uri)
        if dataset is not None:
            found.append(dataset)
    return found


def _dataset(place: str, digest: str | None = None) -> Any:
    """Name a place as OpenLineage does: a bucket and a key, or ``file`` and a path."""
    about = {}
    if digest is not None:
        version = import_module("openlineage.client.facet_v2").dataset_version_dataset
        about["version"] = version.DatasetVersionDatasetFacet(datasetVersion=digest)
    parts = urlsplit(place)
    is_remote = bool(parts.scheme and parts.netloc)
    return import_module("openlineage.client.event_v2").Dataset(
        namespace=f"{parts.scheme}://{parts.netloc}" if is_remote else "file",
        name=parts.path.lstrip("/") if is_remote else parts.path,
        facets=about,
    )


def _run_facet(result: Mapping[str, Any]) -> Any:
    attr = import_module("attr")
    base = import_module("openlineage.client.facet_v2").RunFacet
    fields = {name: attr.ib(default=None) for name in _TOLD}
    return attr.make_class("ElasticFlowRunFacet", fields, bases=(base,), kw_only=True)(
        **{name: result.get(name) for name in _TOLD}
    )

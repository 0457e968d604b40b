"""OpenLineage inputs and outputs of an elastic task: the checkpoint that it starts from, and the one that it produces.

The OpenLineage packages are imported only when its provider calls these methods, so they are not needed otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from airflow.sdk import Asset

_TOLD = ("job_id", "verdict", "deadline", "finished_at", "met", "slack_s", "steps", "final_loss", "gpu_seconds")


class ReportsLineage:
    """The methods that OpenLineage's provider calls; the operator stores its result, once known, in ``_result``."""

    init_from: Any
    inlets: Any
    outlets: Any
    _result: dict[str, Any] | None

    def get_openlineage_facets_on_start(self) -> Any:
        """Report what is read."""
        return facets(init_from=self.init_from, result=None, inlets=self.inlets, outlets=self.outlets)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:  # noqa: ARG002 - its provider's signature
        """Report what was read, and the checkpoint that was written."""
        return facets(init_from=self.init_from, result=self._result, inlets=self.inlets, outlets=self.outlets)

    def get_openlineage_facets_on_failure(self, task_instance: Any) -> Any:
        """Report what was read; a failed training has no output."""
        return self.get_openlineage_facets_on_complete(task_instance)


def facets(*, init_from: Any, result: Mapping[str, Any] | None, inlets: Iterable[Any], outlets: Iterable[Any]) -> Any:
    """Return what one execution read and wrote as OpenLineage's OperatorLineage. ``result`` is the task's, or None.

    Inputs: the inlets, and the checkpoint of ``init_from`` (except ``"latest"``, which is no location). Outputs: the
    outlets, and the checkpoint with the digest of its weights as its version. A run facet ``elasticflow`` has the
    outcome.
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
    """Convert inlets or outlets to datasets: by their provider's converter if there is one, else by their URI."""
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
    """Return the dataset of a location, named as OpenLineage does: bucket and key, or ``file`` and a path."""
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

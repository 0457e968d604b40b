"""The link from a task instance to its job's page.

The URL depends on the task instance alone, so that it is the same wherever and whenever it is computed: Airflow calls
``get_link`` in the task's process at each end of an execution (including a deferral) and stores the result.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode, urlsplit

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

PAGE = "plugin/elasticflow"
"""Path under which Airflow shows the plugin's view; the rest of the URL is the address inside its frame."""


class ElasticFlowJobLink(BaseOperatorLink):
    """Link to the page of the task's job: progress, workers, decisions and their reasons."""

    name = "ElasticFlow job"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 - Airflow's signature
        """Return the URL of the page. ``ti_key`` is a TaskInstanceKey or a task instance."""
        return job_url(ti_key.dag_id, ti_key.run_id, ti_key.task_id, ti_key.map_index)


def job_url(dag_id: str, run_id: str, task_id: str, map_index: int | None = -1) -> str:
    """Return the URL of a task instance's page, under ``[api] base_url`` (relative to the host if that is unset)."""
    base = conf.get("api", "base_url", fallback="").rstrip("/")
    prefix = urlsplit(base).path.rstrip("/")
    index = -1 if map_index is None else map_index
    query = urlencode({"dag_id": dag_id, "run_id": run_id, "task_id": task_id, "map_index": index})
    return f"{base}/{PAGE}{prefix}/elasticflow/?{query}"

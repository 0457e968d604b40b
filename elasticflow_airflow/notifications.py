"""A notifier that reports the state of a training: for ``on_at_risk=`` and for any of Airflow's callbacks.

It composes the message and posts it to a webhook (Slack, Mattermost, or anything that takes JSON) or to the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from airflow.sdk import BaseHook, BaseNotifier, Context

from elasticflow_airflow.links import job_url
from elasticflow_airflow.task.alarms import CONTEXT_KEY

_POST_WITHIN_S = 10.0


class ElasticFlowNotifier(BaseNotifier):
    """Reports the state of a training task's job.

    ``message`` is a template; ``{{ elasticflow }}`` has the job's details (see the reference of ``on_at_risk``). The
    default is ``{{ elasticflow.message }}`` and the URL of the job's page. ``webhook_conn_id`` names a connection (type
    HTTP) whose URL accepts ``{"text": message}``, as the webhooks of Slack and Mattermost do. The URL's path may
    be given in its ``extra`` as ``webhook_path``, or as its password (like Slack's webhook token). Without a connection
    the message is logged as a warning. Subclass and override ``send`` for anything else.
    """

    template_fields: Sequence[str] = ("message",)

    def __init__(self, *, message: str | None = None, webhook_conn_id: str | None = None) -> None:
        super().__init__()
        self.message = message
        self.webhook_conn_id = webhook_conn_id

    def notify(self, context: Context) -> None:
        """Compose the message and send it. Raises httpx.HTTPError if the webhook does not accept it."""
        self.send(self.message or default_message(context), context)

    def send(self, message: str, context: Context) -> None:  # noqa: ARG002 - for those who override it
        """Post the message to the webhook, or log it."""
        if self.webhook_conn_id is None:
            self.log.warning("%s", message)
            return
        connection = BaseHook.get_connection(self.webhook_conn_id)
        scheme = connection.schema or ("https" if connection.port in (None, 443) else "http")
        host = connection.host or ""
        url = host if "://" in host else f"{scheme}://{host}"
        if connection.port:
            url = f"{url}:{connection.port}"
        path = str(connection.extra_dejson.get("webhook_path") or connection.password or "")
        httpx.post(
            f"{url.rstrip('/')}/{path.lstrip('/')}" if path else url, json={"text": message}, timeout=_POST_WITHIN_S
        ).raise_for_status()


def default_message(context: Mapping[str, Any]) -> str:
    """Return the message of the job's details, or the task's error if there are none, and the URL of its page."""
    instance = context.get("ti")
    details = context.get(CONTEXT_KEY)
    if isinstance(details, Mapping):
        said = str(details["message"])
    else:
        who = "a training task" if instance is None else f"{instance.dag_id}.{instance.task_id} (run {instance.run_id})"
        error = context.get("exception")
        said = f"Training {who} failed" + (f": {error}" if error else "")
    if instance is None:
        return said
    return f"{said}\n{job_url(instance.dag_id, instance.run_id, instance.task_id, instance.map_index)}"

"""The description of this provider, which Airflow reads without importing anything else."""

from __future__ import annotations

from typing import Any

from elasticflow_airflow import __version__

_NAME = "ElasticFlow"


def get_provider_info() -> dict[str, Any]:
    """Describe this provider: operators, hook, trigger, connection type and configuration."""
    return {
        "package-name": "elasticflow-airflow",
        "name": _NAME,
        "description": "Deadline-aware elastic training: say what to train and by when, never how many GPUs.",
        "versions": [__version__],
        "integrations": [{"integration-name": _NAME, "tags": ["software"]}],
        "operators": [{"integration-name": _NAME, "python-modules": ["elasticflow_airflow.operators.elastic_train"]}],
        "sensors": [{"integration-name": _NAME, "python-modules": ["elasticflow_airflow.operators.sensor"]}],
        "hooks": [{"integration-name": _NAME, "python-modules": ["elasticflow_airflow.hooks"]}],
        "triggers": [
            {
                "integration-name": _NAME,
                "python-modules": ["elasticflow_airflow.triggers", "elasticflow_airflow.sensor_trigger"],
            }
        ],
        "task-decorators": [
            {"name": "elastic_train", "class-name": "elasticflow_airflow.operators.decorators.elastic_train_task"}
        ],
        "notifications": ["elasticflow_airflow.notifications.ElasticFlowNotifier"],
        "extra-links": ["elasticflow_airflow.links.ElasticFlowJobLink"],
        "connection-types": [
            {
                "connection-type": "elasticflow",
                "hook-class-name": "elasticflow_airflow.hooks.ElasticFlowHook",
                "hook-name": _NAME,
                "ui-field-behaviour": {
                    "hidden-fields": ["login"],
                    "relabeling": {"password": "API token", "schema": "Scheme"},
                    "placeholders": {
                        "host": "gpu-host; replicas: ef-0:8321,ef-1:8321; empty: the embedded service of this machine",
                        "port": "8321",
                        "schema": "http or https",
                    },
                },
                "conn-fields": {
                    "urls": {
                        "label": "Addresses of replicas",
                        "description": "In place of the host, with commas between: http://ef-0:8321,http://ef-1:8321",
                        "schema": {"type": ["string", "null"], "default": None},
                    },
                    "namespace": {
                        "label": "Namespace",
                        "description": "Keeps the jobs of several Airflows at one service apart.",
                        "schema": {"type": ["string", "null"], "default": None},
                    },
                    "verify": {
                        "label": "TLS verification",
                        "description": "true, false, or the path of a CA bundle.",
                        "schema": {"type": ["string", "null"], "default": None},
                    },
                    "timeout_s": {
                        "label": "HTTP timeout (s)",
                        "schema": {"type": ["number", "null"], "default": None},
                    },
                },
            }
        ],
        "cli": ["elasticflow_airflow.airflow_cli.get_commands"],
        "config": {
            "elasticflow": {
                "description": "How this Airflow uses the elasticflow service.",
                "options": {
                    "state_dir": _option(
                        "Folder of the embedded service that is used where no connection is defined."
                        " Default: elasticflow under AIRFLOW_HOME. Its path must stay under 94 bytes.",
                        "string",
                        example="/var/lib/elasticflow",
                    ),
                    "namespace": _option(
                        "Keeps the jobs of several Airflows at one service apart; the connection's extra wins.",
                        "string",
                        default="default",
                    ),
                    "deferrable": _option(
                        "Whether training tasks wait in the triggerer, without a worker slot.",
                        "boolean",
                        default="True",
                    ),
                    "poll_interval_s": _option(
                        "Seconds between two polls of a job; each renews its lease.", "float", default="5"
                    ),
                    "dag_test_poke_s": _option(
                        "Seconds between two polls of a task under dag.test().", "float", default="1"
                    ),
                    "inline_wait_s": _option(
                        "Seconds that a deferrable task waits in the worker first: a rejection or a short job"
                        " needs no triggerer.",
                        "float",
                        default="5",
                    ),
                    "min_deferral_s": _option(
                        "Seconds after the deferral for which a trigger holds its event back at least; then, for a"
                        " minute at most, until the heartbeat of Airflow's scheduler has changed twice. An earlier"
                        " event could meet an Airflow defect that marks the task failed. 0: no waiting at all.",
                        "float",
                        default="15",
                    ),
                    "lease_s": _option(
                        "Seconds without a poll from Airflow after which a job is suspended with a checkpoint.",
                        "float",
                        default="600",
                    ),
                    "orphan_s": _option(
                        "Further seconds after which a suspended job without an owner is cancelled.",
                        "float",
                        default="3600",
                    ),
                    "service_away_s": _option(
                        "Seconds that a waiting task tolerates a service that does not answer.",
                        "float",
                        default="3600",
                    ),
                    "owners_interval_s": _option(
                        "How often, in seconds, the api-server tells the services which owners of jobs are gone: task"
                        " instances that have ended for good or were deleted. 0: never; then only the lease ends them.",
                        "float",
                        default="10",
                    ),
                    "page_conn_id": _option(
                        "Connection of the service that the page in Airflow's UI shows.",
                        "string",
                        default="elasticflow_default",
                    ),
                    "snapshot_max_mib": _option(
                        "Largest size of the code that a job may bring, in MiB.", "float", default="64"
                    ),
                },
            }
        },
    }


def _option(description: str, kind: str, *, default: str | None = None, example: str | None = None) -> dict[str, Any]:
    return {
        "description": description,
        "version_added": "0.1.0",
        "type": kind,
        "example": example,
        "default": default,
    }

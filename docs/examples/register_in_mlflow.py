"""A hook for ``on_promote=``: a training that succeeded becomes a version of a model in MLflow's registry.

Needs ``mlflow-skinny`` (or ``mlflow``) where Airflow's workers run. ``MLFLOW_TRACKING_URI`` says where the registry is.
"""

from __future__ import annotations

from typing import Any


def register(result: dict[str, Any], checkpoint_path: str, dag: Any, task: Any, run_id: str) -> dict[str, Any]:
    """Log the training as an MLflow run, its checkpoint as that run's artifact, and register it under the task's id.

    Called again for the same success (the task was retried because the registry was away), it finds the version of
    that checkpoint and makes no second one. Returns what the task's result shows as ``promoted``.
    """
    import mlflow  # here, not above: the DAG file is read often, and imports MLflow for nothing

    client = mlflow.MlflowClient()
    name = f"{dag.dag_id}.{task.task_id}"
    if not client.search_registered_models(f"name='{name}'"):
        client.create_registered_model(name, description="Trained by elasticflow-airflow.")
    for version in client.search_model_versions(f"name='{name}'"):
        if version.tags.get("digest") == result["checkpoint_digest"]:
            return {"model": name, "version": version.version, "source": version.source}
    mlflow.set_experiment(name)
    with mlflow.start_run(run_name=run_id, tags={"elasticflow.job_id": result["job_id"]}) as run:
        mlflow.log_params({"steps": result["steps"], "deadline": result["deadline"], "verdict": result["verdict"]})
        numbers = {"gpu_seconds": result["gpu_seconds"], "final_loss": result["final_loss"], **result["metrics"]}
        mlflow.log_metrics({key: value for key, value in numbers.items() if isinstance(value, (int, float))})
        mlflow.log_artifacts(checkpoint_path, artifact_path="checkpoint")
    version = client.create_model_version(
        name,
        source=f"{run.info.artifact_uri}/checkpoint",
        run_id=run.info.run_id,
        tags={"digest": str(result["checkpoint_digest"]), "job_id": result["job_id"]},
    )
    return {"model": name, "version": version.version, "source": version.source}

"""Every night at one: retrain the model of each region on what came in, and publish all of them by six."""

from __future__ import annotations

from datetime import time, timedelta

import pendulum
from airflow.sdk import DAG, task

from elasticflow_airflow.operators import ElasticTrainOperator

REGIONS = ("north", "south", "east", "west")
SPEEDS = {1: 4.0, 2: 7.4, 4: 13.5, 8: 24.0}
"""Steps/s of a training by its number of workers, as the last weeks have shown; without it the first run measures."""

with DAG(
    "nightly_models",
    schedule="0 1 * * *",
    start_date=pendulum.datetime(2026, 1, 1, tz="Europe/Berlin"),
    catchup=False,
) as dag:

    @task
    def extract() -> dict[str, int]:
        """Say how many rows each region has. A real one would write them somewhere."""
        return {"north": 200_000, "south": 160_000, "east": 120_000, "west": 80_000}

    @task
    def publish(results: list[dict]) -> list[str]:
        """Publish the models that were trained; here, say where they are."""
        return [result["checkpoint_path"] for result in results]

    rows = extract()
    trainings = [
        ElasticTrainOperator(
            task_id=f"train_{region}",
            script="training/train_region.py",
            script_args=["--region", region],
            epochs="{{ params.epochs }}",
            samples="{{ ti.xcom_pull('extract')['" + region + "'] }}",
            global_batch_size=64,
            params={"epochs": 5},
            # Nobody says how many GPUs: the models must be published by six, and that takes some minutes.
            deadline=time(6),
            deadline_of="publish",
            scaling_curve=SPEEDS,
            downstream_reserve=timedelta(minutes=10),
        )
        for region in REGIONS
    ]
    rows >> trainings
    publish([training.output for training in trainings])

"""The database goes away under a real service, for longer than a lease: nobody pays for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.postgres import postgres

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import ElasticFlowClient, ServiceUnavailable, snapshot_folder

LEASE_S, ORPHAN_S = 8.0, 2.0


def submission(client: ElasticFlowClient, folder: Path, task_id: str, steps: int) -> JobSubmission:
    (folder / "train.py").write_text("print()")
    snapshot = snapshot_folder(folder)
    client.upload_snapshot(snapshot)
    return JobSubmission(
        identity=JobIdentity(dag_id="daily", run_id="run1", task_id=task_id),
        command=Command(snapshot=snapshot.sha256, script="train.py"),
        length=Length(steps=steps),
        global_batch_size=8,
        best_effort=True,
        max_workers=1,
        scaling_curve={1: 20.0},
        lease_s=LEASE_S,
        orphan_s=ORPHAN_S,
    )


@pytest.mark.postgres
def test_a_database_that_is_away_costs_no_job_its_lease_and_no_answer_is_made_up(daemons, open_client, tmp_path):
    with postgres() as server:
        server.sql("CREATE DATABASE service")
        endpoint = daemons.served("token", database_url=server.url.format("service"))
        client = open_client(endpoint)
        first = client.submit(submission(client, tmp_path, "train", 200))
        second = submission(client, tmp_path, "meanwhile", 20)

        server.stop()
        with pytest.raises(ServiceUnavailable, match="cannot use its database now"):
            client.renew(first.job.job_id, first.claim)
        with pytest.raises(ServiceUnavailable, match="does not know whether this was stored"):
            client.submit(second)
        time.sleep(LEASE_S + ORPHAN_S + 1.0)  # As long as it takes for an owner to be given up: that is the point.
        server.start()

        with ElasticFlowClient(endpoint, retry_for_s=60) as patient:
            other = patient.submit(second)
            assert other.created
            while not (status := patient.renew(first.job.job_id, first.claim)).state.terminal:
                time.sleep(0.1)
            events = patient.events(first.job.job_id)
            story = [f"{event.kind}: {event.reason}" for event in events]
            assert (status.state, status.step, status.incarnation) == ("succeeded", 200, 1), story
            assert not {"parked", "restarting", "suspended"} & {event.kind for event in events}, story
            assert status.generation == 1, story
            assert patient.status(other.job.job_id).state == "succeeded"

"""What Airflow's database says of the owners of jobs, and what of that the service is told."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from elasticflow_airflow.api import JobIdentity
from elasticflow_airflow.api.owners import OwnedJob, OwnedJobs, OwnersAnswer
from elasticflow_airflow.owners.owner_report import ENDED, find_states, name_of_airflow, report_owners

ME, NOW = "me", 1000.0


class Jobs:
    """A service with these live jobs, a page for each."""

    def __init__(self, *jobs: OwnedJob) -> None:
        self.jobs, self.reports = jobs, []

    def owned_jobs(self, namespace: str, after: str = "") -> OwnedJobs:
        rest = [job for job in self.jobs if job.job_id > after]
        return OwnedJobs(at=NOW, jobs=rest[:1], next_after=rest[0].job_id if len(rest) > 1 else None)

    def report_owners(self, report: Any) -> OwnersAnswer:
        self.reports.append(report)
        return OwnersAnswer(cancelled=[seen.job_id for seen in report.owners if seen.owner != "there"])


def job(number: int = 0, **changes: Any) -> OwnedJob:
    identity = JobIdentity(dag_id="daily", run_id="run1", task_id="train", map_index=number)
    values = {"job_id": f"j{number}", "claim": 7, "identity": identity, "heard_at": NOW, "known_to": ME}
    return OwnedJob(**{**values, "seen_at": NOW, **changes})


def told(one: OwnedJob, states: dict[Any, str | None]) -> list[tuple[str, int, str, str]]:
    service = Jobs(one)
    report_owners(service, "default", ME, lambda _: states)
    return [(seen.job_id, seen.claim, seen.owner, seen.state) for r in service.reports for seen in r.owners]


KEY = ("daily", "run1", "train", 0)


@pytest.mark.parametrize("state", sorted(ENDED))
def test_who_has_ended_for_good_is_gone(state):
    assert told(job(), {KEY: state}) == [("j0", 7, "ended", state)]


def test_every_other_state_is_no_end():
    from airflow.utils.state import TaskInstanceState

    others = {str(state.value) for state in TaskInstanceState} - ENDED
    assert {"up_for_retry", "up_for_reschedule", "deferred", "restarting"} <= others
    for state in [None, *sorted(others)]:
        assert told(job(), {KEY: state}) == []
        assert told(job(known_to=None), {KEY: state}) == [("j0", 7, "there", state or "")]
        assert told(job(heard_at=0.0, seen_at=0.0), {KEY: state}) == [("j0", 7, "there", state or "")]


def test_who_is_not_there_is_gone_only_if_it_was_here():
    assert told(job(), {}) == [("j0", 7, "deleted", "")]
    assert told(job(known_to=None), {}) == []
    assert told(job(known_to="another"), {}) == []


def test_all_pages_are_looked_at_and_claims_are_read_before_the_database():
    service = Jobs(*(job(number) for number in range(3)))
    asked = []

    def find(keys):
        asked.append([key[3] for key in keys])
        return dict.fromkeys(keys, "failed")

    assert report_owners(service, "default", ME, find) == ["j0", "j1", "j2"]
    assert asked == [[0], [1], [2]]


def test_a_database_that_is_away_says_nothing():
    service = Jobs(job())

    def find(_):
        raise sa.exc.OperationalError("SELECT", {}, Exception("away"))

    with pytest.raises(sa.exc.OperationalError):
        report_owners(service, "default", ME, find)
    assert service.reports == []


def test_states_are_found_in_airflows_database(run_dag, tmp_path):
    from airflow.models.taskinstance import TaskInstance
    from airflow.providers.standard.operators.empty import EmptyOperator
    from airflow.sdk import DAG
    from airflow.utils.session import create_session

    with DAG("owners_in_the_database", schedule=None) as dag:
        EmptyOperator.partial(task_id="mapped").expand(doc=["a", "b"])
        EmptyOperator(task_id="one")
    run = run_dag(dag)
    keys = [(dag.dag_id, run.run_id, "mapped", index) for index in range(3)]
    keys += [(dag.dag_id, run.run_id, "one", -1), (dag.dag_id, "another run", "one", -1)]
    many = [("no such", f"run{n}", "one", -1) for n in range(500)]
    with create_session() as session:
        session.execute(
            sa.update(TaskInstance)
            .where(TaskInstance.dag_id == dag.dag_id, TaskInstance.map_index == 1)
            .values(state="up_for_retry")
        )
        session.execute(
            sa.update(TaskInstance)
            .where(TaskInstance.dag_id == dag.dag_id, TaskInstance.task_id == "one")
            .values(state=None)
        )
        found = find_states(session, [*keys, *many])
    assert found == {keys[0]: "success", keys[1]: "up_for_retry", keys[3]: None}


def test_an_airflow_is_named_by_its_database_and_nothing_of_that_shows():
    url = sa.make_url("postgresql://airflow:s3cret@db.example:5432/airflow")
    name = name_of_airflow(url)
    assert name == name_of_airflow(url.set(username="other", password="changed", drivername="postgresql+psycopg"))
    assert name != name_of_airflow(url.set(database="test"))
    assert name_of_airflow(sa.make_url("sqlite:////a.db")) != name_of_airflow(sa.make_url("sqlite:////b.db"))
    assert name.isalnum()
    assert len(name) == 16


def test_the_services_are_those_that_elastic_tasks_name(airflow_db, make_task):
    """Also of a task whose DAG was deleted since: its jobs may run there still."""
    from airflow.api.common.delete_dag import delete_dag
    from airflow.utils.session import create_session

    from elasticflow_airflow.owners.owner_watch import Connections
    from elasticflow_airflow.testing.dags import store_dag

    def read() -> set[str]:
        with create_session() as session:
            return connections.read(session)

    connections = Connections()
    for conn_id in ("gpu_cluster", "{{ var.value.conn }}"):
        store_dag(make_task(elasticflow_conn_id=conn_id).dag)
        found = read()
        assert {"elasticflow_default", "gpu_cluster"} <= found
        assert not [name for name in found if "{{" in name]
    delete_dag("daily")
    assert "gpu_cluster" in read()

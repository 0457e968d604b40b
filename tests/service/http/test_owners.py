"""Airflow says which owners are gone: their jobs end within seconds, and no other job does."""

from __future__ import annotations

import pytest
from support.service_parts import parts_of

from elasticflow_airflow.api.owners import OwnerSeen, OwnersReport
from elasticflow_airflow.service.http.routes.owner_routes import OWNERS_PATH
from elasticflow_airflow.service.requests.owner_service import OwnerService

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
LONG = {"steps": 100_000, "scaling_curve": CURVE, "max_workers": 1}


@pytest.fixture
def owners(world):
    parts = parts_of(world)
    return OwnerService(world.store, parts.notifier, parts.started_at, world.clock)


def report(job, owner, *, claim=None, airflow="prod", namespace="default", state="failed"):
    seen = OwnerSeen(job_id=job.job.job_id, claim=claim or job.claim, owner=owner, state=state)
    return OwnersReport(namespace=namespace, airflow=airflow, owners=[seen])


def test_a_job_whose_task_has_ended_is_cancelled_with_a_checkpoint(world, owners):
    job = world.submit(**LONG)
    world.until(lambda: world.status(job).step >= 20, "it trains")
    assert owners.report(report(job, "ended")).cancelled == [job.job.job_id]
    done = world.ended(job, limit_s=30)
    assert (done.state, done.state_reason) == ("cancelled", "its Airflow task has ended (failed)")
    (said,) = world.events(job, "owner_gone")
    assert said.reason == "Airflow says that its task has ended (failed): it is cancelled"
    assert world.submit(**LONG).job.incarnation == 2, "a task that is cleared later goes on from its checkpoint"


def test_a_report_from_before_a_new_attempt_changes_nothing(world, owners):
    first = world.submit(**LONG)
    world.submit(**LONG)  # the task was cleared, and has attached
    for owner in ("ended", "deleted"):
        assert owners.report(report(first, owner)).cancelled == []
    world.run(5)
    assert world.status(first).state == "running"


def test_a_deletion_is_believed_of_the_airflow_only_that_had_the_task(world, owners):
    """Another Airflow of the same namespace knows nothing of the job, and that says nothing."""
    job = world.submit(**LONG)
    assert owners.report(report(job, "deleted")).cancelled == []
    owners.report(report(job, "there", airflow="prod"))
    assert owners.report(report(job, "deleted", airflow="test")).cancelled == []
    assert owners.report(report(job, "deleted", airflow="prod")).cancelled == [job.job.job_id]
    assert world.ended(job, limit_s=30).state_reason == "its Airflow task was deleted"


def test_that_an_owner_was_seen_outlives_the_service(world, owners):
    job = world.submit(**LONG)
    owners.report(report(job, "there"))
    world.restart()
    again = OwnerService(world.store, parts_of(world).notifier, world.now_s, world.clock)
    assert again.report(report(job, "deleted")).cancelled == [job.job.job_id]


def test_another_namespace_is_not_touched(world, owners):
    job = world.submit(**LONG)
    assert owners.report(report(job, "there", namespace="other")).cancelled == []
    assert owners.report(report(job, "ended", namespace="other")).cancelled == []
    assert owners.owned("other", "", 10).jobs == []
    (one,) = owners.owned("default", "", 10).jobs
    assert (one.job_id, one.claim, one.known_to) == (job.job.job_id, job.claim, None)


def test_what_is_over_or_being_cancelled_is_left_as_it_is(world, owners):
    over = world.submit(run="over", steps=10, scaling_curve=CURVE)
    world.ended(over)
    world.job_service.cancel((job := world.submit(run="ending", **LONG)).job.job_id, job.claim, "no longer wanted")
    for one in (over, job):
        assert owners.report(report(one, "ended")).cancelled == []
    assert owners.owned("default", "", 10).jobs == []
    assert world.ended(job).state_reason == "no longer wanted"


def test_the_live_jobs_come_in_pages(world, owners):
    jobs = [world.submit(run=f"run{n}", **LONG).job.job_id for n in range(3)]
    first = owners.owned("default", "", 2)
    rest = owners.owned("default", first.next_after, 2)
    assert [one.job_id for page in (first, rest) for one in page.jobs] == sorted(jobs)
    assert rest.next_after is None


# -- unowned -------------------------------------------------------------------------------------------------------


def test_a_job_that_nobody_asks_for_is_unowned_long_before_its_lease(world, owners):
    job = world.submit(**LONG)
    heard_at = world.now_s
    world.run(50, every=10)
    assert owners.unowned() == []
    world.run(20, every=10)
    (one,) = owners.unowned()
    assert (one.job.job_id, one.since_at, one.job.state) == (job.job.job_id, heard_at, "running")
    assert one.why == "nobody has asked for it for 1 min 10 s"
    world.job_service.renew(job.job.job_id, job.claim)
    world.step()  # which writes down who has asked since the last
    assert owners.unowned() == []


def test_a_task_that_airflow_has_yet_is_an_owner_that_is_silent(world, owners):
    """Between two tries nobody asks, for as long as ``retry_delay`` says."""
    job = world.submit(**LONG)
    for _ in range(4):
        world.run(30, every=10)
        owners.report(report(job, "there", state="up_for_retry"))
        assert owners.unowned() == []
    world.run(100, every=20)
    assert [one.job.job_id for one in owners.unowned()] == [job.job.job_id]


def test_whoever_went_home_still_owns_the_job(world, owners):
    world.submit(lease_s=30 * 86400.0, orphan_s=30 * 86400.0, **LONG)
    world.run(600, every=60)
    assert owners.unowned() == []


def test_nobody_could_ask_while_the_service_was_away(world, owners):
    job = world.submit(**LONG)
    world.stop()
    world.now_s += 3600
    world.elapsed_s += 3600
    world.start()
    again = OwnerService(world.store, parts_of(world).notifier, world.now_s, world.clock)
    world.step(1)
    assert again.unowned() == []
    world.run(70, every=10)
    assert [one.job.job_id for one in again.unowned()] == [job.job.job_id]


def test_one_whose_owner_is_gone_is_unowned_until_its_workers_have_left(world, owners):
    job = world.submit(fake={"save_s": 20.0}, **LONG)
    world.until(lambda: world.status(job).step >= 20, "it trains")
    owners.report(report(job, "ended"))
    (one,) = owners.unowned()
    assert (one.since_at, one.why) == (world.now_s, "Airflow says that its task is gone; its workers save and leave")
    world.ended(job, limit_s=60)
    assert owners.unowned() == []


# -- the routes ----------------------------------------------------------------------------------------------------


def test_the_routes(world):
    from starlette.testclient import TestClient

    from elasticflow_airflow.service.http.app import build_app

    job = world.submit(**LONG)
    parts = parts_of(world)
    asked_at = parts.traffic.last_monotonic_s
    api = TestClient(build_app(parts, token="s3cret"), headers={"Authorization": "Bearer s3cret"})
    assert [one["job_id"] for one in api.get(OWNERS_PATH, params={"namespace": "default"}).json()["jobs"]] == [
        job.job.job_id
    ]
    answer = api.post(OWNERS_PATH, json=report(job, "ended").model_dump(mode="json"))
    assert answer.json() == {"cancelled": [job.job.job_id]}
    assert parts.traffic.last_monotonic_s == asked_at, "an Airflow that looks on keeps no embedded service awake"
    assert [one["job"]["job_id"] for one in api.get("/v1/unowned").json()] == [job.job.job_id]
    assert api.get(OWNERS_PATH).status_code == 422
    assert api.get(OWNERS_PATH, params={"namespace": "d"}, headers={"Authorization": "Bearer no"}).status_code == 401
    wrong = report(job, "ended").model_dump(mode="json") | {"airflow": "\0"}
    assert api.post(OWNERS_PATH, json=wrong).status_code == 422

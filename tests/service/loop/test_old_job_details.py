"""What is kept of jobs that ended long ago: the job and its result, not every detail."""

from __future__ import annotations

import sqlalchemy as sa

from elasticflow_airflow.engines import job_files
from elasticflow_airflow.runtime.protocol import checkpoint_dir
from elasticflow_airflow.service.loop import old_job_details
from elasticflow_airflow.service.store.tables import EngineRecordRow, EventRow, GenerationRow, SampleRow
from elasticflow_airflow.service.telemetry.tallies import Tallies

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
DAY_S = 86400.0


def rows(world, table) -> int:
    with world.store.read() as reader:
        return reader.session.scalar(sa.select(sa.func.count()).select_from(table)) or 0


def ended(world, run: str = "r1"):
    job = world.submit(run=run, steps=96, scaling_curve=CURVE)
    assert world.ended(job).state == "succeeded"
    world.until(lambda: world.row(job).drained, "the engine has forgotten it")
    return job


def test_details_of_jobs_that_ended_long_ago_are_forgotten_and_the_job_is_not(world):
    job = ended(world)
    before = world.status(job)
    world.step(89 * DAY_S)
    assert rows(world, GenerationRow)
    assert rows(world, SampleRow)
    newer = ended(world, "r2")
    world.step(2 * DAY_S)
    assert world.generations(job) == []
    assert world.events(job) == []
    after = world.status(job)
    assert (after.state, after.result, after.generation) == ("succeeded", before.result, before.generation)
    assert world.generations(newer)
    assert world.events(newer)


def test_the_engines_record_of_a_job_goes_with_the_details_of_its_last_incarnation(world):
    """A new leader reads the records of all jobs: otherwise of all that there ever were."""
    old, again = ended(world), ended(world, "again")
    with world.store.write() as tx:
        for job in (old, again):
            tx.session.add(EngineRecordRow(job_id=job.job.job_id, record={}, epoch=1))
    world.step(60 * DAY_S)
    world.job_service.acknowledge(again.job.job_id, again.claim)
    assert world.ended(world.submit(run="again", steps=96, scaling_curve=CURVE)).incarnation == 2
    world.step(31 * DAY_S)
    assert world.generations(old) == world.generations(again, 1) == []
    with world.store.read() as reader:
        assert reader.session.scalars(sa.select(EngineRecordRow.job_id)).all() == [again.job.job_id]


def test_of_its_folder_only_the_checkpoints_are_kept(world, tmp_path):
    old, elsewhere = ended(world), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data").write_text("of somebody else")
    folder = world.incarnation_dir(old)
    kept = {path: path.read_bytes() for path in checkpoint_dir(folder).rglob("*") if path.is_file()}
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "w0.log").write_text("step 1")
    (folder / "session.json").write_text("{}")
    (folder / "link").symlink_to(elsewhere)
    world.step(89 * DAY_S)
    newer = ended(world, "r2")
    young = world.incarnation_dir(newer)
    (young / "session.json").write_text("{}")
    world.step(2 * DAY_S)
    assert kept
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == kept
    assert [path.name for path in folder.iterdir()] == ["checkpoints"]
    assert (elsewhere / "data").exists()
    assert (young / "session.json").exists()


def test_a_folder_that_cannot_be_emptied_holds_up_nobody(world, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    job = ended(world)
    (world.incarnation_dir(job) / "logs").mkdir(exist_ok=True)
    monkeypatch.setattr(job_files, "remove", refuse)
    world.step(91 * DAY_S)
    assert world.generations(job) == []
    assert not world.reconciler.problem


def test_a_task_that_is_cleared_after_that_trains_anew_with_numbers_of_its_own(world):
    job = ended(world)
    world.job_service.acknowledge(job.job.job_id, job.claim)
    world.step(91 * DAY_S)
    again = world.submit(run="r1", steps=96, scaling_curve=CURVE)
    assert again.job.incarnation == 2
    assert world.ended(again).state == "succeeded"
    assert min(one.generation for one in world.generations(again)) > 1


def test_what_lives_keeps_everything(world):
    job = world.submit(steps=int(32 * 100 * DAY_S), scaling_curve=CURVE, lease_s=200 * DAY_S)
    world.reach(job, "running")
    world.step(91 * DAY_S)
    world.step(old_job_details.EVERY_S)
    assert len(world.generations(job)) == 1
    assert rows(world, SampleRow)


def test_batches_are_small_and_go_on_until_all_is_done(world, monkeypatch):
    monkeypatch.setattr(old_job_details, "_INCARNATIONS_AT_ONCE", 1)
    monkeypatch.setattr(old_job_details, "_EVENTS_AT_ONCE", 2)
    jobs = [ended(world, f"r{number}") for number in range(3)]
    world.step(91 * DAY_S)
    left = [len(world.generations(job)) > 0 for job in jobs]
    assert left.count(True) == 2
    events = rows(world, EventRow)
    world.step(5.0)
    assert rows(world, EventRow) == events - 2
    world.until(lambda: not any(world.events(job) for job in jobs), "all is forgotten", every=5.0)
    assert not any(world.generations(job) for job in jobs)


def test_for_ever_means_for_ever(make_world):
    world = make_world(keep_days=float("inf"))
    job = ended(world)
    world.step(1000 * DAY_S)
    assert world.events(job)
    assert world.generations(job)


def test_counters_of_a_service_that_starts_on_a_log_without_its_beginning_begin_at_zero(world):
    ended(world)
    whole = Tallies()
    with world.store.read() as reader:
        whole.catch_up(reader)
    assert whole.ended == {"succeeded": 1}
    world.step(91 * DAY_S)
    ended(world, "r2")
    tallies = Tallies()
    with world.store.read() as reader:
        tallies.catch_up(reader)
        whole.catch_up(reader)
    assert tallies.ended == {}
    assert whole.ended == {"succeeded": 2}
    ended(world, "r3")
    with world.store.read() as reader:
        tallies.catch_up(reader)
    assert tallies.ended == {"succeeded": 1}

"""What the reconcile loop does on good days: measuring, verdicts, deadlines, leases, secrets."""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import pytest
from pydantic import ValidationError

from elasticflow_airflow.api import Length
from elasticflow_airflow.service.loop import reconcile
from elasticflow_airflow.service.refusal import Refusal
from elasticflow_airflow.service.store.tables import IncarnationRow

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
DAY_S = 86_400.0
_SILENT_END = {"reports": False, "uses_session": True, "exit_at_step": 5}
"""A script of the session that ends with status 0 before it has made a step."""


def purposes(world, job):
    return [g.purpose for g in world.generations(job)]


# -- how fast ----------------------------------------------------------------------------------------------------


def test_a_first_run_is_measured_while_it_trains_and_then_admitted(world):
    job = world.submit(within=900, steps=2000)
    assert (job.job.state, job.job.verdict.decision) == ("profiling", "undecided")
    status = world.reach(job, "running")
    measured = {e.data["workers"]: e.data["steps_per_s"] for e in world.events(job, "measured")}
    assert measured == pytest.approx(CURVE, rel=0.1)
    assert status.verdict.decision == "admitted"
    assert status.step > 0, "what was made while measuring counts"
    done = world.ended(job)
    assert (done.state, done.result.steps, done.result.met) == ("succeeded", 2000, True)


@pytest.mark.parametrize(
    "given",
    [{}, {"fake": {"reports": False, "exit_at_step": 5}, "length": Length()}],
    ids=["of a session", "that reports nothing"],
)
def test_a_training_that_ends_between_two_looks_has_started(world, given):
    job = world.submit(**{"steps": 5, "best_effort": True, "scaling_curve": CURVE, "max_workers": 1, **given})
    world.step(60.0)
    world.ended(job)
    kinds = [event.kind for event in world.events(job)]
    assert kinds.index("resized") < kinds.index("started") < kinds.index("succeeded")
    assert world.events(job, "started")[0].data["workers"] == 1
    assert all(g.running_at is not None for g in world.generations(job))


def test_a_script_that_fails_between_two_looks_before_its_first_step_has_not_started(world):
    job = world.submit(best_effort=True, steps=5, scaling_curve=CURVE, fake=_SILENT_END)
    world.step(60.0)
    assert world.ended(job).state == "failed"
    assert not world.events(job, "started")


def test_nothing_of_a_job_that_has_ended_stays_in_memory(world):
    """A daemon serves jobs for months; what it counted of the reports of each must go with it."""
    lives = world.submit(run="lives", steps=2000, best_effort=True)
    world.ended(world.submit(run="ends", within=900, steps=50))
    world.until(lambda: {key[0] for key in world.reconciler._inbox._counts} == {lives.job.job_id}, "to be forgotten")


def test_the_next_run_of_the_task_is_admitted_at_once(world):
    world.ended(world.submit(run="sunday", within=600))
    monday = world.submit(run="monday", within=600)
    assert monday.job.verdict.decision == "admitted", "within the answer to the submit"
    assert world.ended(monday).result.met
    assert world.events(monday, "submitted")[0].data["curve"].keys() == {"1", "2", "4"}
    assert set(purposes(world, monday)) == {"train"}


def test_history_is_of_one_batch_size_and_script(world):
    world.ended(world.submit(run="sunday", within=600))
    other = world.submit(run="monday", within=600, global_batch_size=64)
    assert other.job.verdict.decision == "undecided"


def test_a_scaling_curve_that_is_given_is_believed(world):
    job = world.submit(within=600, scaling_curve=CURVE)
    assert job.job.verdict.decision == "admitted"
    assert job.job.verdict.plan
    assert world.ended(job).result.met
    assert set(purposes(world, job)) == {"train"}


def test_the_length_may_be_known_only_to_the_script(world):
    job = world.submit(within=600, length=Length(epochs=2), fake={"samples": 3200})
    assert job.job.total_steps is None
    done = world.ended(job)
    assert (done.state, done.total_steps, done.result.steps) == ("succeeded", 200, 200)


def test_a_script_that_reports_nothing_becomes_best_effort_and_the_log_says_why(make_world):
    world = make_world(profile_startup_s=5)
    job = world.submit(within=600, steps=300, fake={"reports": False}, max_workers=1)
    world.until(lambda: world.events(job, "warning"), "a warning")
    warning = world.events(job, "warning")[0]
    assert "progress_regex= or progress_file=" in warning.reason
    assert world.status(job).best_effort
    done = world.ended(job)
    assert done.state == "failed", "its length is known, and nothing of it was reported"
    assert "after reporting 0 of 300 steps" in done.failure


def test_sizes_stay_powers_of_two_within_the_limits(make_world):
    world = make_world(nodes=2, slots=4)
    job = world.submit(within=900, steps=600, min_workers=2, max_workers=4)
    world.ended(job)
    assert {g.workers for g in world.generations(job)} <= {2, 4}


def test_a_size_with_slow_steps_is_known_roughly_and_used(make_world):
    """One that the time for measuring did not suffice for could never be used again, though no larger one was left."""
    world = make_world(nodes=2, slots=1)
    job = world.submit(within=3600, steps=30, max_workers=2, fake={"steps_per_s": {"1": 0.05, "2": 0.08}})
    world.until(lambda: world.status(job).verdict.decision == "admitted", "it is admitted")
    first = world.events(job, "measured")[0]
    assert (first.data["workers"], first.data["steps_per_s"]) == (1, pytest.approx(0.05, rel=0.2))
    assert "in a few steps only" in first.reason
    world.until(lambda: world.status(job).workers == 2, "it trains with two")
    world.engine.remove_node("node1")
    world.until(lambda: world.status(job).workers == 1, "it goes on with one")
    assert world.ended(job, 1200).result.met


def test_on_a_full_cluster_measuring_waits_and_then_names_scaling_curve(world):
    slow = {"steps_per_s": {"4": 16.0}}
    full = world.submit(task="full", within=170, steps=1600, min_workers=4, scaling_curve={4: 16.0}, fake=slow)
    assert full.job.verdict.decision == "admitted"
    job = world.submit(task="new", within=100, steps=50)
    assert job.job.state == "waiting"
    assert "slots that no promise needs" in job.job.state_reason
    done = world.ended(job)
    assert done.state == "rejected"
    assert "scaling_curve=" in done.verdict.reason
    assert world.ended(full).result.met


# -- verdicts ----------------------------------------------------------------------------------------------------


def test_a_hopeless_deadline_is_rejected_with_the_earliest_one_and_that_one_is_kept(world):
    first = world.submit(within=20, steps=3000, scaling_curve=CURVE)
    verdict = first.job.verdict
    assert (first.job.state, verdict.decision) == ("rejected", "rejected")
    assert verdict.earliest_deadline_at > first.job.deadline_at
    (event,) = world.events(first, "rejected")
    assert event.event_id == verdict.event_id
    assert "earliest deadline that can be promised now" in verdict.reason
    assert world.status(first).failure is None
    world.run(20)
    second = world.submit(deadline_at=verdict.earliest_deadline_at, steps=3000, scaling_curve=CURVE)
    assert second.job.verdict.decision == "admitted", second.job.verdict.reason
    assert world.ended(second).result.met


def test_the_sentence_and_the_number_name_the_same_deadline(world):
    verdict = world.submit(within=20, steps=3000, scaling_curve=CURVE).job.verdict
    named = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)? UTC", verdict.reason.split("promised now", 1)[1])
    assert len(set(named)) == 1, f"one offer, not two: {verdict.reason}"


def test_a_deadline_that_is_past_is_rejected_at_once(world):
    job = world.submit(within=-5)
    assert job.job.state == "rejected"
    assert "has passed already" in job.job.verdict.reason


def test_on_reject_best_effort(world):
    job = world.submit(within=20, steps=1000, scaling_curve=CURVE, on_reject="best_effort")
    assert (job.job.verdict.decision, job.job.best_effort, job.job.deadline_at) == ("best_effort", True, None)
    assert world.ended(job).result.met is None


def test_on_reject_renegotiate_within_the_latest(world):
    job = world.submit(
        within=20, steps=1000, scaling_curve=CURVE, on_reject="renegotiate", latest_deadline_at=world.now_s + 600
    )
    assert job.job.verdict.decision == "renegotiated"
    assert world.now_s + 20 < job.job.deadline_at <= world.now_s + 600
    assert world.ended(job).result.met


def test_on_reject_late_lets_the_value_fall(world):
    within = {"within": 20, "steps": 1000, "scaling_curve": CURVE, "on_reject": "late"}
    job = world.submit(**within, latest_deadline_at=world.now_s + 600)
    assert job.job.verdict.decision == "renegotiated"
    assert re.search(r"accepted .+ instead, for 7\d% of its value", job.job.verdict.reason)
    assert world.ended(job).result.met


def test_a_latest_deadline_that_leaves_no_choice_is_refused(world):
    for choice in ("late", "renegotiate"):
        with pytest.raises(ValidationError, match="latest_deadline is not later than the deadline"):
            world.submission(within=20, on_reject=choice, latest_deadline_at=world.now_s + 20)
        with pytest.raises(ValidationError, match=f'on_reject="{choice}" needs latest_deadline'):
            world.submission(within=20, on_reject=choice)


def test_on_reject_renegotiate_beyond_the_latest_is_rejected(world):
    job = world.submit(
        within=20, steps=1000, scaling_curve=CURVE, on_reject="renegotiate", latest_deadline_at=world.now_s + 30
    )
    assert job.job.state == "rejected"


def test_on_reject_wait_is_admitted_when_capacity_comes_back(world):
    full = world.submit(task="full", within=270, steps=3200, min_workers=4, scaling_curve={4: 16.0})
    world.run(2)
    job = world.submit(task="waits", within=260, steps=640, scaling_curve={4: 32.0}, min_workers=4, on_reject="wait")
    assert job.job.state == "waiting"
    world.job_service.cancel(full.job.job_id, full.claim, "makes room")
    assert world.ended(job).result.met
    assert world.status(job).verdict.decision == "admitted"


def test_two_jobs_share_the_slots_and_no_slot_is_given_twice(world):
    jobs = [world.submit(task=f"t{n}", within=300, steps=600, scaling_curve=CURVE) for n in range(3)]
    assert {job.job.verdict.decision for job in jobs} == {"admitted"}

    def over() -> bool:
        live = [g for g in world.engine.world.gangs.values() if g.started and g.phase != "ended"]
        slots = [slot for gang in live for slot in gang.spec.placement]
        assert len(slots) == len(set(slots))
        return all(world.status(job).state.terminal for job in jobs)

    world.until(over, "all end")
    assert all(world.status(job).result.met for job in jobs)


# -- deadlines that are missed -----------------------------------------------------------------------------------

LIES = {1: 40.0, 2: 72.0, 4: 128.0}


def miss(make_world, on_miss):
    world = make_world(checkpoint_interval_s=3.0)
    job = world.submit(within=55, steps=2500, scaling_curve=LIES, on_miss=on_miss)
    assert job.job.verdict.decision == "admitted"
    done = world.ended(job)
    assert len(world.events(job, "at_risk")) >= 1
    (missed,) = world.events(job, "deadline_missed")
    assert f'on_miss="{on_miss}"' in missed.reason
    assert 0 <= missed.at - job.job.deadline_at < 5
    return world, job, done


def test_on_miss_finish(make_world):
    _, _job, done = miss(make_world, "finish")
    assert (done.state, done.result.met, done.result.steps) == ("succeeded", False, 2500)
    assert done.result.slack_s < 0


def test_on_miss_fail(make_world):
    _, job, done = miss(make_world, "fail")
    assert done.state == "failed"
    assert "missed its deadline" in done.failure
    assert done.result.finished_at < job.job.deadline_at + 5


def test_on_miss_use_last_checkpoint(make_world):
    world, job, done = miss(make_world, "use_last_checkpoint")
    assert (done.state, done.result.met) == ("succeeded", False)
    assert 0 < world.row(job).promoted.step < 2500
    assert done.result.checkpoint_path.endswith(world.row(job).promoted.path)
    assert done.result.steps == world.row(job).promoted.step, "the steps of what is used"


# -- owners that go away -----------------------------------------------------------------------------------------


def test_a_job_without_an_owner_is_parked_and_goes_on_when_one_is_back(world):
    job = world.submit(within=900, steps=1500, scaling_curve=CURVE, lease_s=20, orphan_s=100)
    world.run(15)
    world.job_service.renew(job.job.job_id, job.claim)
    world.run(15)
    assert world.status(job).state == "running"
    world.reach(job, "suspended", limit_s=20)
    (parked,) = world.events(job, "parked")
    assert "suspended with a checkpoint" in parked.reason
    world.until(lambda: world.status(job).workers == 0 and world.row(job).promoted, "its workers have saved and left")
    saved = world.row(job).promoted.step
    assert saved == world.status(job).step
    world.run(30)
    world.job_service.renew(job.job.job_id, job.claim)
    world.reach(job, "running", limit_s=10)
    assert world.events(job, "started")[-1].data["step"] == saved

    def over() -> bool:
        world.job_service.renew(job.job.job_id, job.claim)
        return world.status(job).state.terminal

    world.until(over, "it ends")
    assert world.status(job).result.met


def test_a_job_whose_owner_stays_away_is_cancelled(world):
    job = world.submit(within=3600, steps=9000, scaling_curve=CURVE, lease_s=20, orphan_s=40)
    done = world.ended(job)
    assert done.state == "cancelled"
    assert "no client has polled the job for" in done.state_reason
    assert 60 <= world.elapsed_s < 70
    assert world.row(job).promoted.step > 0
    assert done.orphaned, "by nobody's wish: who comes back submits it again"
    again = world.submit(within=3600, steps=9000, scaling_curve=CURVE, lease_s=20, orphan_s=400)
    assert (again.created, again.job.incarnation) == (True, 2)
    world.reach(again, "suspended")
    world.job_service.cancel(again.job.job_id, again.claim, "its owner wants that")
    cancelled = world.ended(again)
    assert (cancelled.state, cancelled.orphaned) == ("cancelled", False)


def test_a_service_that_was_away_gives_owners_a_new_first_limit(world):
    job = world.submit(within=3600, steps=1500, scaling_curve=CURVE, lease_s=20, orphan_s=40)
    world.run(15)
    world.restart()
    world.run(15)
    assert world.status(job).state == "running"


@pytest.mark.parametrize("away_s", [15, 30, 300])
def test_a_service_that_could_not_hear_its_owners_gives_them_a_new_first_limit(world, away_s):
    """Its database was away, or the process was stopped: not one pass, for longer than a lease or than an orphan."""
    job = world.submit(within=3600, steps=9000, scaling_curve=CURVE, lease_s=20, orphan_s=40)
    world.run(15)
    world.step(away_s)
    world.run(15)
    assert world.status(job).state == "running"
    assert not [line for line in world.story() if "nobody has asked" in line]
    world.reach(job, "suspended")
    world.step(away_s)
    assert world.status(job).state == "suspended", "nobody has come back"
    assert world.ended(job).state == "cancelled"


@pytest.mark.trouble
def test_an_owner_that_comes_back_while_a_pass_fails_is_heard(world):
    job = world.submit(within=3600, steps=1500, scaling_curve=CURVE, lease_s=10, orphan_s=500)
    world.reach(job, "suspended")
    world.until(lambda: world.status(job).workers == 0, "its workers have left")
    with world.store.write() as tx:  # A renewal, and the pass after it fails before its commit.
        tx.incarnation(job.job.job_id, 1).renewals += 1
    break_one_pass(world)
    world.step(1)
    assert world.reconciler.problem
    world.run(5)
    assert world.status(job).state == "running"


def test_who_asks_renews_the_lease_without_a_write(world, monkeypatch):
    """A thousand deferred tasks ask two hundred times a second: their writes would queue behind the loop's."""
    job = world.submit(within=9000, steps=15000, scaling_curve=CURVE, lease_s=20, orphan_s=40)
    write, writes = type(world.store).write, []
    for _ in range(10):
        world.run(6)
        with monkeypatch.context() as patch:
            patch.setattr(type(world.store), "write", lambda store: writes.append(1) or write(store))
            assert world.job_service.renew(job.job.job_id, job.claim).state == "running"
            with pytest.raises(Refusal, match="stale"):
                world.job_service.renew(job.job.job_id, job.claim - 1)
    assert not writes
    assert not world.events(kind="parked")
    world.reach(job, "suspended", limit_s=40)  # a stale claim has renewed nothing


def test_an_owner_that_comes_back_late_is_counted_where_the_loop_looks_before_it_writes(world):
    """The loop decides outside of a transaction, and checks the count in the store again when it writes."""
    job = world.submit(within=9000, steps=15000, scaling_curve=CURVE, lease_s=20, orphan_s=40)
    world.run(5)
    counts = [world.row(job).renewals]
    for pause_s in (5, 14):
        world.job_service.renew(job.job.job_id, job.claim)
        world.run(pause_s)
        world.job_service.renew(job.job.job_id, job.claim)
        counts.append(world.row(job).renewals)
    assert counts[1] == counts[0]
    assert counts[2] == counts[1] + 1


def test_a_clock_that_jumps_a_day_expires_no_lease(world):
    job = world.submit(steps=1500, scaling_curve=CURVE, lease_s=20, orphan_s=40)
    patient = world.submit(task="patient", within=3 * DAY_S, steps=1500, scaling_curve=CURVE, lease_s=20, orphan_s=40)
    world.run(5)
    for jump in (DAY_S, -DAY_S):
        world.now_s += jump
        for one in (job, patient):
            world.job_service.renew(one.job.job_id, one.claim)
        world.run(15)
        assert not world.events(kind="parked")
    directions = [e.reason for e in world.events(kind="clock_jumped")]
    assert ["forward" in reason for reason in directions] == [True, False]
    assert "leases are not affected" in directions[0]
    for one in (job, patient):
        world.row(one)

        def over(one=one) -> bool:
            world.job_service.renew(job.job.job_id, job.claim)
            world.job_service.renew(patient.job.job_id, patient.claim)
            return world.status(one).state.terminal

        world.until(over, "it ends")
        assert world.status(one).state == "succeeded"


# -- slots -------------------------------------------------------------------------------------------------------


def test_a_session_that_loads_for_long_counts_as_running_and_has_not_started(world):
    """Else it would grow while it loads, and begin anew."""
    fake = {"uses_session": True, "reports": False}
    job = world.submit(task="long", best_effort=True, steps=10_000, scaling_curve=CURVE, fake=fake)
    world.until(lambda: world.generations(job)[0].running_at is not None, "it counts as running")
    world.step(1.0)
    (state,) = world.reconciler._scheduler.states()
    assert not state.started


@pytest.mark.parametrize("in_place", [False, True])
def test_jobs_that_come_and_go_keep_no_other_from_starting(make_world, in_place):
    """Whenever one left, the other grew, and shrank when the next one came: each time it began to start anew."""
    world = make_world(slots=2)
    fake = {"startup_s": 6.0, "join_s": 6.0, "in_place": in_place}
    job = world.submit(task="long", best_effort=True, steps=10_000, scaling_curve=CURVE, max_workers=2, fake=fake)
    for visit in range(20):
        brief = world.submit(task=f"brief{visit}", best_effort=True, scaling_curve=CURVE, max_workers=1)
        world.run(1.5)
        world.job_service.cancel(brief.job.job_id, brief.claim, "was brief")
        world.run(1.0)
    assert world.status(job).step > 100, "\n".join(world.story())
    world.until(lambda: world.status(job).workers == 2, "it grows once nobody comes any more", 60)


def test_slots_that_another_service_holds_are_told_and_not_used(world):
    world.step()
    world.engine.set_busy("node0", 1, "job other of the service in /elsewhere")
    world.step(6)
    (event,) = [e for e in world.events(kind="node_changed") if "held" in e.reason]
    assert event.reason == "node node0 has 4 slots; slot 1 is held by job other of the service in /elsewhere"
    job = world.submit(within=600, scaling_curve=CURVE)
    world.ended(job)
    assert all(["node0", 1] not in g.placement for g in world.generations(job))
    world.engine.set_busy("node0", 1, None)
    world.step(6)
    assert world.events(kind="node_changed")[-1].reason == "node node0 has 4 slots"


def test_slots_that_the_job_before_still_saves_on_are_waited_for(world):
    slow = world.submit(task="slow", steps=3000, scaling_curve=CURVE, fake={"save_s": 20})
    world.until(lambda: world.status(slow).workers == 4, "it has all slots")
    job = world.submit(task="urgent", within=200, steps=600, scaling_curve=CURVE)
    assert job.job.verdict.decision == "admitted"
    assert world.ended(job).state == "succeeded"
    assert world.status(job).result.met
    assert world.ended(slow).state == "succeeded"


def test_a_node_that_is_lost_costs_its_gangs_a_start_from_the_last_checkpoint(make_world):
    world = make_world(nodes=2, slots=2, checkpoint_interval_s=3.0)
    job = world.submit(within=900, steps=1500, scaling_curve=CURVE)
    world.until(lambda: world.status(job).step > 200, "some steps")
    node = world.status(job).slots[0][0]
    world.engine.remove_node(node)
    done = world.ended(job)
    assert done.state == "succeeded"
    assert world.events(kind="node_lost")[0].reason == f"node {node} is gone"
    lost = next(event for event in world.events(job, "resized") if f"node {node} is lost" in event.reason)
    again = next(event for event in world.events(job, "started") if event.at > lost.at)
    assert again.reason.startswith("generation 2 trains with 2 workers from step ")
    assert again.at - lost.at < 5.0


def test_a_node_that_joins_is_used(make_world):
    world = make_world(nodes=1, slots=1)
    job = world.submit(within=900, steps=1500, scaling_curve=CURVE, logical_workers=4)
    world.reach(job, "running")
    world.engine.add_node(replace(world.engine.inventory()[0], node_id="node1", slots=4))
    world.until(lambda: world.status(job).workers == 4, "it grows onto the new node")
    assert world.ended(job).result.rescales >= 1


# -- checkpoints -------------------------------------------------------------------------------------------------


def test_old_checkpoints_are_deleted_and_the_promoted_one_stays(make_world):
    world = make_world(checkpoint_interval_s=2.0, keep_checkpoints=2)
    job = world.submit(within=900, steps=600, scaling_curve=CURVE, max_workers=1)
    done = world.ended(job)
    world.run(3)
    left = sorted(p.name for p in (world.incarnation_dir(job) / "checkpoints").glob("g*/step-*"))
    assert left[-1] == "step-000000000600"
    assert 1 <= len(left) <= 3
    assert done.result.checkpoint_path.endswith(left[-1])


# -- secrets -----------------------------------------------------------------------------------------------------

SECRET = "hunter2-of-the-hub"


def test_a_secret_reaches_the_workers_and_nothing_else(world, capfd):
    job = world.submit(
        within=600,
        scaling_curve=CURVE,
        secret_env={"TOKEN": SECRET},
    )
    world.run(2)
    (gang,) = world.engine.world.gangs.values()
    assert gang.spec.secret_env == {"TOKEN": SECRET}
    sealed = world.row(job).secret_env
    assert sealed
    assert SECRET.encode() not in sealed
    key = world.settings.state_dir / "secret.key"
    assert key.stat().st_mode & 0o777 == 0o600
    world.restart()

    def over() -> bool:
        if any(g.phase == "running" for g in world.engine.world.gangs.values()):
            world.engine.fail_worker(job.job.job_id, 0, 1, f"could not log in with {SECRET}")
        return world.status(job).state.terminal

    world.until(over, "it gives up")
    done = world.ended(job)
    assert done.state == "failed"
    assert "could not log in with ***" in done.failure
    assert world.row(job).secret_env is None, "erased at the end"
    assert SECRET not in done.model_dump_json()
    assert SECRET not in "\n".join(e.model_dump_json() for e in world.events())
    world.stop()
    for path in [p for p in world.base.rglob("*") if p.is_file()]:
        if path.suffix != ".db-wal" and "reports" not in path.parts:
            assert SECRET.encode() not in path.read_bytes(), path
    said = capfd.readouterr()
    assert SECRET not in said.out + said.err
    world.start()


def test_secrets_that_cannot_be_read_any_more_fail_that_job_and_no_other(world):
    broken = world.submit(task="broken", within=900, steps=900, scaling_curve=CURVE, secret_env={"TOKEN": SECRET})
    sound = world.submit(task="sound", within=900, steps=300, scaling_curve=CURVE)
    world.run(3)
    from cryptography.fernet import Fernet

    (world.settings.state_dir / "secret.key").write_bytes(Fernet.generate_key())
    world.restart()
    world.run(15)
    assert world.status(broken).state == "running", "its workers have what they need"
    world.engine.lose(broken.job.job_id)
    assert world.ended(sound).state == "succeeded"
    done = world.ended(broken)
    assert done.state == "failed"
    assert "secret.key is not the key they were encrypted with" in done.failure


# -- passes that fail --------------------------------------------------------------------------------------------


def break_one_pass(world):
    """The next pass raises right before its commit, as a full disk would make it."""
    real = world.reconciler._write_states

    def broken(context):
        world.reconciler._write_states = real
        real(context)
        raise OSError(28, "No space left on device")

    world.reconciler._write_states = broken


@pytest.mark.trouble
def test_a_pass_that_fails_is_repaired_by_the_next(world):
    job = world.submit(within=900, steps=600, scaling_curve=CURVE)
    passes = 0

    def over() -> bool:
        nonlocal passes
        passes += 1
        if passes % 3 == 0:
            break_one_pass(world)
        return world.status(job).state.terminal

    world.until(over, "it ends")
    done = world.status(job)
    assert (done.state, done.result.steps, done.result.met) == ("succeeded", 600, True)
    assert world.reconciler.problem == "" or "No space left" in world.reconciler.problem
    assert len(world.events(job, "admitted")) == len(world.events(job, "succeeded")) == 1


@pytest.mark.trouble
def test_reports_are_folded_in_once_whatever_fails(world):
    job = world.submit(within=900, steps=600, scaling_curve=CURVE, max_workers=1)
    world.reach(job, "running")
    for number in range(30):
        if number % 3 == 0:
            break_one_pass(world)
        if number % 7 == 0:
            world.restart()
        world.step(0.5)
    world.step(0.5)
    (gang,) = world.engine.world.gangs.values()
    (row,) = world.generations(job)
    assert row.folded == {"g000001-r000": len(gang.reports)}
    window = row.window
    assert window.done == gang.reports[-1].step
    assert window.steps / window.seconds == pytest.approx(10.0, rel=0.05)


@pytest.mark.trouble
def test_a_problem_is_shown_while_it_lasts(world):
    world.step()
    break_one_pass(world)
    world.step()
    assert "No space left on device" in world.reconciler.problem
    world.step()
    assert world.reconciler.problem == ""


def test_calls_that_the_engine_refuses_once_are_tried_again(world):
    world.engine.fail_next("apply", "the supervisor does not start")
    job = world.submit(within=900, steps=300, scaling_curve=CURVE)
    done = world.ended(job)
    assert done.state == "succeeded"
    assert "the supervisor does not start" in world.events(job, "not_started")[0].reason


def test_a_gang_that_the_engine_always_refuses_fails_with_its_message(world):
    job = world.submit(within=900, steps=300, scaling_curve=CURVE, fake={"no_such_field": 1})
    done = world.ended(job)
    assert done.state == "failed"
    assert "no_such_field" in done.failure
    assert "could not be started" in done.state_reason


@pytest.mark.parametrize("declared", [{"progress_regex": r"step (?P<step>\d+)"}, {"progress_file": "progress.json"}])
def test_a_script_that_was_to_show_its_progress_and_never_did_is_no_success(world, declared):
    """Nor is it one as best effort: it may have trained nothing at all."""
    job = world.submit(steps=300, fake={"reports": False}, max_workers=1, **declared)
    done = world.ended(job)
    assert done.state == "failed"
    assert "never showed a step: what was trained is unknown" in done.failure


@pytest.mark.parametrize("given", [{"length": Length()}, {"steps": 300}, {"length": Length(), "within": 900}])
def test_a_script_of_the_session_that_ends_well_before_its_first_step_has_failed(world, given):
    """As os._exit(0) does it: the process is gone before it could say that it has trained nothing."""
    job = world.submit(fake=_SILENT_END, max_workers=1, **given)
    done = world.ended(job)
    assert done.state == "failed"
    assert "ended with status 0 before its first session.step()" in done.failure
    assert "nothing was trained" in done.failure


def test_with_the_default_patience_too_a_silent_script_is_no_rejection(world):
    """What the service waits for must come before the scheduler gives the measurement up."""
    job = world.submit(within=3600, steps=3000, fake={"reports": False}, max_workers=1)
    done = world.ended(job, limit_s=1000)
    assert (done.state, done.best_effort) == ("failed", True)
    assert [event.kind for event in world.events(job) if event.kind in ("warning", "rejected")] == ["warning"]


@pytest.mark.parametrize("given", [{"steps": 300}, {"length": Length(epochs=3)}, {"steps": 300, "within": 3600}])
def test_status_0_is_no_success_where_the_length_is_known_and_nothing_of_it_was_reported(world, given):
    job = world.submit(fake={"reports": False, "exit_at_step": 50}, max_workers=1, **given)
    done = world.ended(job)
    assert done.state == "failed"
    assert "ended with status 0 after reporting 0 of 3" in done.failure
    assert "leave steps= and epochs= out" in done.failure


@pytest.mark.parametrize("within", [None, 3600])
def test_of_a_script_of_unknown_length_the_log_says_that_nothing_is_known(world, within):
    given = {} if within is None else {"within": within}
    job = world.submit(length=Length(), fake={"reports": False, "exit_at_step": 50}, max_workers=1, **given)
    done = world.ended(job)
    assert done.state == "succeeded"
    (event,) = world.events(job, "succeeded")
    assert "reported no step" in event.reason
    assert "nothing is known of what it has trained" in event.reason
    assert "0 steps" not in event.reason
    assert ("before the deadline" in event.reason) == (within is not None)


def test_the_rows_of_a_pass_go_with_it_and_wait_for_no_garbage_collection(world):
    """A thousand jobs are 25,000 objects a pass; to find them, all threads would stand still for a second."""
    for number in range(4):
        world.submit(task=f"t{number}", steps=5000, scaling_curve={1: 10.0}, max_workers=1)
    world.run(5)
    gc.collect()
    gc.disable()
    try:
        world.run(10)
        rows = sum(type(one) is IncarnationRow for one in gc.get_objects())
    finally:
        gc.enable()
    assert rows <= 2 * 4, "those of a pass, and of the answer to a question"


def test_on_a_machine_that_is_never_quick_enough_each_pass_decides_on_one(world, monkeypatch):
    """However short the time for new jobs is by the clock, no pass leaves all of them to the next."""
    monkeypatch.setattr(reconcile, "_CROWD_S", (0.0, 0.0))
    world.reconciler._crowd_s = 0.0
    jobs = [world.submit(task=f"t{number}", steps=100, scaling_curve={1: 10.0}) for number in range(3)]
    for _ in jobs:
        world.step(1.0)
    assert all(world.row(job).introduced for job in jobs)

"""Identity, incarnation and claim: which attempt goes on with which training, and who may change it."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import pytest

from elasticflow_airflow.api import AmendRequest, Command, Length
from elasticflow_airflow.runtime.stores import manifest
from elasticflow_airflow.runtime.stores.manifest import verify_candidate
from elasticflow_airflow.service.job_files import candidates
from elasticflow_airflow.service.refusal import Refusal
from elasticflow_airflow.times import moment

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}


@pytest.fixture
def world(make_world):
    return make_world(checkpoint_interval_s=2.0)


def gangs(world):
    return sorted((g.spec.incarnation, g.spec.generation) for g in world.engine.world.gangs.values())


# -- attaching ---------------------------------------------------------------------------------------------------


def test_an_equal_submit_attaches_to_the_live_job_with_a_higher_claim(world):
    first = world.submit(within=600, scaling_curve=CURVE)
    world.run(3)
    second = world.submit(within=600, deadline_at=first.job.deadline_at, scaling_curve=CURVE)
    assert (first.created, second.created) == (True, False)
    assert second.claim == first.claim + 1
    assert second.job.incarnation == first.job.incarnation == 1
    assert second.warnings == []
    assert world.ended(second).state == "succeeded"
    assert len(world.events(first, "submitted")) == 1


def test_a_success_that_nobody_acknowledged_is_attached_to_and_trains_nothing_again(world):
    first = world.submit(within=600, scaling_curve=CURVE)
    done = world.ended(first)
    world.run(5)
    before = world.status(first).generation
    again = world.submit(within=600, scaling_curve=CURVE)
    assert not again.created
    assert (again.job.state, again.job.incarnation) == ("succeeded", 1)
    assert again.job.result == done.result
    world.run(5)
    assert world.status(first).generation == before
    assert gangs(world) == []


def test_a_submission_that_comes_a_second_time_changes_nothing_however_late_it_is(world):
    """As when a replica stood still, the client asked another one, and the first goes on with what it had."""
    job = world.submission(steps=100)
    job_id = job.identity.job_id

    def submit(key: str | None) -> tuple[int, int, bool]:
        found = world.job_service.submit(job_id, job, key)
        return found.claim, found.incarnation, found.created

    assert submit("a" * 32) == (1, 1, True)
    assert submit("a" * 32) == (1, 1, False)
    assert submit("b" * 32) == (2, 1, False)
    assert submit("a" * 32) == (1, 1, False), "of an attempt that another one has replaced: its claim is stale"
    assert world.job_service.renew(job_id, 2).claim == 2
    world.job_service.cancel(job_id, 2, "it is over")
    world.until(lambda: world.status(job_id).state.terminal, "it ends")
    assert submit("b" * 32) == (2, 1, False), "it would train once more"
    assert submit("c" * 32) == (3, 2, True)
    assert submit(None) == (4, 2, False)
    for one in "defg":
        submit(one * 32)
    assert submit("c" * 32)[0] == 9, "only the last submissions are known"


def test_attach_takes_a_new_claim_and_nothing_else(world):
    first = world.submit(within=600, scaling_curve=CURVE)
    second = world.job_service.attach(first.job.job_id, lease_s=5.0)
    assert (second.claim, second.job.incarnation) == (2, 1)
    assert world.row(first).lease_s == 5.0


def test_nobody_attaches_to_a_job_that_never_was(world):
    with pytest.raises(Refusal, match="there is no job 'nothing'") as caught:
        world.job_service.attach("nothing", None)
    assert caught.value.status == 404


def test_what_does_not_make_another_training_does_not_open_an_incarnation(world):
    first = world.submit(within=600, scaling_curve=CURVE, labels={"try": "1"}, fake={"save_s": 0.1})
    second = world.submit(
        deadline_at=first.job.deadline_at, scaling_curve=None, labels={"try": "2"}, max_workers=2, lease_s=9.0
    )
    assert not second.created


# -- new incarnations --------------------------------------------------------------------------------------------


def test_after_an_acknowledged_success_the_task_trains_again_from_nothing(world):
    first = world.submit(within=600, scaling_curve=CURVE)
    world.ended(first)
    world.job_service.acknowledge(first.job.job_id, first.claim)
    second = world.submit(within=600, scaling_curve=CURVE)
    assert (second.created, second.job.incarnation, second.claim) == (True, 2, 2)
    assert world.events(second, "resumed") == []
    assert second.job.step == 0
    done = world.ended(second)
    assert (done.state, done.result.steps) == ("succeeded", 200)
    assert done.result.checkpoint_path != world.row(first, 1).result.checkpoint_path


def fail(world):
    job = world.submit(within=600, scaling_curve=CURVE, max_workers=1, fake={"fail_at_step": 100})
    assert world.ended(job).state == "failed"
    return job


def cancel(world):
    job = world.submit(within=600, scaling_curve=CURVE, max_workers=1)
    world.until(lambda: world.status(job).step >= 100, "half way")
    world.job_service.cancel(job.job.job_id, job.claim, "no longer wanted")
    assert world.ended(job).state == "cancelled"
    return job


@pytest.mark.parametrize("end", [fail, cancel])
def test_after_a_failure_or_cancel_the_next_attempt_goes_on_from_the_last_valid_checkpoint(world, end):
    first = end(world)
    saved = world.row(first).promoted.step
    assert saved >= 60
    second = world.submit(within=600, scaling_curve=CURVE)
    assert (second.created, second.job.incarnation) == (True, 2)
    world.step()
    (resumed,) = world.events(second, "resumed")
    assert resumed.reason == f"goes on from step {saved}, the last valid checkpoint of incarnation 1"
    assert world.status(second).step == saved
    adopted = world.row(second).promoted
    info = verify_candidate(world.incarnation_dir(second, 2) / "checkpoints" / adopted.path)
    assert (info.step, info.incarnation) == (saved, 2)
    done = world.ended(second)
    assert (done.state, done.result.steps) == ("succeeded", 200)
    trained = [e for e in world.events(second, "started") if e.incarnation == 2]
    assert trained[0].data["step"] == saved


def test_a_damaged_checkpoint_is_not_taken_over_and_the_log_says_so(world):
    first = cancel(world)
    folder = world.incarnation_dir(first) / "checkpoints" / world.row(first).promoted.path
    (folder / "fake.json").write_text("torn")
    second = world.submit(within=600, scaling_curve=CURVE)
    world.step()
    (warning,) = world.events(second, "warning")
    assert "starts from the beginning" in warning.reason
    assert "fake.json" in warning.reason
    assert world.ended(second).state == "succeeded"


@pytest.mark.parametrize(("module", "call"), [(shutil, "copyfile"), (tempfile, "mkdtemp"), (manifest, "_flush")])
def test_a_checkpoint_that_cannot_be_read_now_is_waited_for(world, monkeypatch, module, call):
    """A disk that is full, or a file system that is away: to begin anew would throw away what was trained."""
    first = cancel(world)
    saved, real, tries = world.row(first).promoted.step, getattr(module, call), []

    def no_room(*_: object, **__: object) -> None:
        tries.append(world.elapsed_s)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, call, no_room)
    monkeypatch.setattr(candidates, "_LONGEST_REST_S", 0.01)
    second = world.submit(within=600, scaling_curve=CURVE)
    world.until(lambda: len(tries) >= 3, "it is tried again")
    (warning,) = world.events(second, "warning")
    assert "waits for its checkpoint" in warning.reason
    assert "No space left" in world.status(second).state_reason
    assert 2 <= len(tries) <= 6
    monkeypatch.setattr(module, call, real)
    done = world.ended(second)
    assert (done.state, done.result.steps) == ("succeeded", 200)
    (resumed,) = world.events(second, "resumed")
    assert f"goes on from step {saved}" in resumed.reason


def hold_copies(world, monkeypatch) -> Callable[[], None]:
    """Copies begin and do not end; call what is returned, and they do."""
    may_go_on, real = threading.Event(), candidates.take_over

    def slowly(*args: Any) -> candidates.Adopted:
        assert may_go_on.wait(60)
        return real(*args)

    def go_on() -> None:
        may_go_on.set()
        world.waits_for_candidates = True

    monkeypatch.setattr(candidates, "take_over", slowly)
    world.waits_for_candidates = False
    return go_on


def test_while_a_checkpoint_is_copied_everything_else_goes_on(world, monkeypatch):
    """Copying gigabytes may take minutes."""
    saved = world.row(cancel(world)).promoted.step
    may_go_on = hold_copies(world, monkeypatch)
    second = world.submit(within=600, scaling_curve=CURVE)
    other = world.submit(task="other", within=600, scaling_curve=CURVE)
    assert world.ended(other).state == "succeeded"
    assert (world.status(second).state, world.events(second, "resumed")) == ("submitted", [])
    may_go_on()
    assert world.ended(second).state == "succeeded"
    (resumed,) = world.events(second, "resumed")
    assert resumed.data["step"] == saved


def test_a_service_that_was_killed_while_a_checkpoint_was_copied_copies_it(world, monkeypatch):
    saved = world.row(cancel(world)).promoted.step
    monkeypatch.setattr(candidates, "take_over", lambda *_: candidates.Adopted(None, "not yet", again=True))
    second = world.submit(within=600, scaling_curve=CURVE)
    monkeypatch.undo()
    world.restart()
    assert world.ended(second).state == "succeeded"
    (resumed,) = world.events(second, "resumed")
    assert resumed.data["step"] == saved


def test_a_job_that_is_cancelled_while_its_checkpoint_is_copied_leaves_it_to_the_next(world, monkeypatch):
    saved = world.row(cancel(world)).promoted.step
    monkeypatch.setattr(candidates, "take_over", lambda *_: candidates.Adopted(None, "not yet", again=True))
    second = world.submit(within=600, scaling_curve=CURVE)
    world.job_service.cancel(second.job.job_id, second.claim, "no longer wanted")
    assert world.ended(second).state == "cancelled"
    monkeypatch.undo()
    third = world.submit(within=600, scaling_curve=CURVE)
    assert world.ended(third).state == "succeeded"
    (resumed,) = world.events(third, "resumed")
    assert f"goes on from step {saved}, the last valid checkpoint of incarnation 1" in resumed.reason


def test_a_copy_that_comes_after_the_job_was_cancelled_is_deleted(world, monkeypatch):
    cancel(world)
    may_go_on = hold_copies(world, monkeypatch)
    second = world.submit(within=600, scaling_curve=CURVE)
    world.job_service.cancel(second.job.job_id, second.claim, "no longer wanted")
    assert world.ended(second).state == "cancelled"
    may_go_on()
    world.run(3)
    checkpoints = world.incarnation_dir(second, 2) / "checkpoints"
    assert list((checkpoints / "g000000").iterdir()) == []
    assert world.events(second, "resumed") == []


def test_what_was_away_for_one_incarnation_is_there_for_the_next(world):
    first = cancel(world)
    promoted = world.row(first).promoted
    folder, away = world.incarnation_dir(first) / "checkpoints" / promoted.path, world.base / "away"
    folder.rename(away)
    second = world.submit(within=600, scaling_curve=CURVE)
    world.step()
    assert "starts from the beginning" in world.events(second, "warning")[0].reason
    world.job_service.cancel(second.job.job_id, second.claim, "not like this")
    assert world.ended(second).state == "cancelled"
    assert world.row(second).promoted is None
    away.rename(folder)
    third = world.submit(within=600, scaling_curve=CURVE)
    world.step()
    (resumed,) = world.events(third, "resumed")
    assert resumed.data["step"] == promoted.step


def test_a_rejected_job_may_be_submitted_again(world):
    first = world.submit(within=5, scaling_curve=CURVE)
    assert world.ended(first).state == "rejected"
    second = world.submit(within=600, scaling_curve=CURVE)
    assert (second.created, second.job.incarnation) == (True, 2)
    assert second.job.verdict.decision == "admitted"


@pytest.mark.parametrize(
    "changed",
    [
        {"args": ("--lr", "0.1")},
        pytest.param({"steps": 150}, marks=pytest.mark.slow),
        pytest.param({"global_batch_size": 64}, marks=pytest.mark.slow),
        pytest.param({"init_from": "latest"}, marks=pytest.mark.slow),
    ],
)
def test_a_changed_specification_cancels_the_live_job_and_trains_anew_from_nothing(world, changed):
    first = world.submit(within=600, scaling_curve=CURVE)
    world.until(lambda: world.status(first).step > 20, "some steps")
    second = world.submit(within=600, scaling_curve=CURVE, **changed)
    assert (second.created, second.job.incarnation) == (True, 2)
    alive = []

    def over() -> bool:
        alive.append({g.spec.incarnation for g in world.engine.world.gangs.values() if g.phase not in ("ended",)})
        return world.status(second).state.terminal

    world.until(over, "the second ends")
    assert all(len(incarnations) <= 1 for incarnations in alive)
    old, new = world.row(first, 1), world.row(second, 2)
    assert (old.state, new.state) == ("cancelled", "succeeded")
    assert "submitted again with a changed specification" in str(old.state_reason)
    assert world.events(second, "resumed") == []


def test_three_changed_submits_in_a_row_leave_one_training(world):
    job = world.submit(within=600, scaling_curve=CURVE, steps=200)
    world.run(2)
    world.submit(within=600, scaling_curve=CURVE, steps=210)
    job = world.submit(within=600, scaling_curve=CURVE, steps=220)
    assert world.ended(job).state == "succeeded"
    assert [world.row(job, i).state for i in (1, 2, 3)] == ["cancelled", "cancelled", "succeeded"]
    world.until(lambda: gangs(world) == [], "the engine has forgotten all")


def test_a_submit_during_a_cancel_opens_a_new_incarnation_that_goes_on(world):
    first = world.submit(within=600, scaling_curve=CURVE)
    world.until(lambda: world.status(first).step > 60, "some steps")
    world.job_service.cancel(first.job.job_id, first.claim, "the attempt was cleared")
    second = world.submit(within=600, scaling_curve=CURVE)
    assert (second.created, second.job.incarnation) == (True, 2)
    world.until(lambda: world.events(second, "resumed"), "it is taken over")
    assert world.ended(second).state == "succeeded"


def test_an_attempt_that_never_began_does_not_lose_what_the_one_before_saved(world):
    first = world.submit(within=600, scaling_curve=CURVE, fake={"save_s": 5})
    world.until(lambda: world.status(first).step > 60, "some steps")
    world.job_service.cancel(first.job.job_id, first.claim, "the attempt was cleared")
    second = world.submit(within=600, scaling_curve=CURVE)
    world.job_service.cancel(first.job.job_id, second.claim, "and cleared again")
    third = world.submit(within=600, scaling_curve=CURVE)
    assert third.job.incarnation == 3
    world.until(lambda: world.events(third, "resumed"), "it is taken over")
    assert "of incarnation 1" in world.events(third, "resumed")[0].reason
    assert world.ended(third).state == "succeeded"


def test_a_submit_while_the_workers_of_a_rejected_job_still_leave(world):
    first = world.submit(within=40, steps=2_000, fake={"save_s": 5})
    world.until(lambda: world.row(first).ending, "measured and rejected")
    second = world.submit(within=3600, steps=2_000)
    assert (second.created, second.job.incarnation) == (True, 2)
    done = world.ended(second)
    assert (done.state, world.row(first, 1).state) == ("succeeded", "rejected")


def test_generation_numbers_never_start_again(world):
    numbers = []
    for end in (cancel, fail):
        job = end(world)
        numbers += [g.generation for g in world.generations(job)]
    job = world.submit(within=600, scaling_curve=CURVE)
    world.ended(job)
    world.restart()
    numbers += [g.generation for g in world.generations(job)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 3


# -- claims ------------------------------------------------------------------------------------------------------


def test_a_stale_claim_changes_nothing(world):
    first = world.submit(within=600, scaling_curve=CURVE)
    second = world.submit(deadline_at=first.job.deadline_at, scaling_curve=CURVE)
    job_id, before = first.job.job_id, world.status(first)
    calls = [
        lambda: world.job_service.cancel(job_id, first.claim, "late"),
        lambda: world.job_service.renew(job_id, first.claim),
        lambda: world.job_service.acknowledge(job_id, first.claim),
        lambda: world.job_service.amend(job_id, AmendRequest(claim=first.claim, value=2.0)),
        lambda: world.job_service.cancel(job_id, second.claim + 1, "from the future"),
    ]
    for call in calls:
        with pytest.raises(Refusal, match="stale: a newer attempt holds claim 2") as caught:
            call()
        assert (caught.value.status, caught.value.error) == (409, "stale_claim")
    assert world.status(first) == before
    assert world.ended(first).state == "succeeded"


def test_the_old_attempt_cannot_cancel_the_new_attempts_job(world):
    first = cancel(world)
    second = world.submit(within=600, scaling_curve=CURVE)
    with pytest.raises(Refusal):
        world.job_service.cancel(first.job.job_id, first.claim, "on_kill of the old attempt")
    assert world.ended(second).state == "succeeded"


def test_only_a_success_can_be_acknowledged(world):
    job = world.submit(within=600, scaling_curve=CURVE)
    with pytest.raises(Refusal, match="only a success can be acknowledged") as caught:
        world.job_service.acknowledge(job.job.job_id, job.claim)
    assert caught.value.status == 409


def test_acknowledging_and_cancelling_twice_is_as_once(world):
    job = world.submit(within=600, scaling_curve=CURVE)
    world.ended(job)
    for _ in range(2):
        assert world.job_service.acknowledge(job.job.job_id, job.claim).acknowledged
    assert world.job_service.cancel(job.job.job_id, job.claim, "too late").state == "succeeded"
    assert len(world.events(job, "acknowledged")) == 1


# -- amendments --------------------------------------------------------------------------------------------------


def test_another_deadline_is_an_amendment_of_the_live_job(world):
    first = world.submit(within=600, scaling_curve=CURVE)
    second = world.submit(within=900, scaling_curve=CURVE)
    assert not second.created
    world.step()
    assert world.status(second).deadline_at == second.job.deadline_at == first.job.deadline_at + 300
    assert len(world.events(first, "amended")) == 1
    third = world.submit(within=900, scaling_curve=CURVE)
    world.step()
    assert len(world.events(third, "amended")) == 1, "the same again is no amendment"


def test_a_deadline_that_cannot_be_promised_leaves_the_one_before(world):
    first = world.submit(within=600, scaling_curve=CURVE)
    world.run(2)
    again = world.submit(within=4, scaling_curve=CURVE)
    world.step()
    assert world.status(first).deadline_at == first.job.deadline_at
    (refused,) = world.events(first, "amend_rejected")
    assert refused.data["earliest_deadline_at"] is not None
    assert any("deadline" in warning for warning in again.warnings), "the attempt is told that its deadline is not kept"
    # The next attempt asks for the first deadline again, which is what holds: nothing to amend, nothing refused.
    world.submit(deadline_at=first.job.deadline_at, scaling_curve=CURVE)
    world.step()
    assert world.status(first).deadline_at == first.job.deadline_at
    assert len(world.events(first, "amend_rejected")) == 1


def test_an_amendment_is_answered_with_what_would_hold(world):
    job = world.submit(within=600, scaling_curve=CURVE)
    answer = world.amend(job.job.job_id, AmendRequest(claim=job.claim, deadline_at=world.now_s + 3))
    assert not answer.accepted
    better = world.amend(
        job.job.job_id, AmendRequest(claim=job.claim, deadline_at=answer.earliest_deadline_at, value=3.0)
    )
    assert better.accepted
    assert (better.job.deadline_at, better.job.value) == (answer.earliest_deadline_at, 3.0)
    assert world.ended(job).result.met


def test_giving_the_deadline_up(world):
    job = world.submit(within=600, scaling_curve=CURVE)
    answer = world.amend(job.job.job_id, AmendRequest(claim=job.claim, best_effort=True))
    assert answer.accepted
    assert (answer.job.best_effort, answer.job.deadline_at) == (True, None)
    assert answer.job.verdict.decision == "best_effort"
    assert world.ended(job).result.met is None


def test_who_waits_may_give_its_deadline_up_and_take_another(world):
    full = world.submit(task="full", within=270, steps=3200, min_workers=4, scaling_curve={4: 16.0})
    job = world.submit(task="waits", within=260, steps=640, scaling_curve={4: 32.0}, min_workers=4, on_reject="wait")
    assert (job.job.state, job.job.verdict.decision) == ("waiting", "undecided")
    answer = world.amend(job.job.job_id, AmendRequest(claim=job.claim, best_effort=True))
    assert (answer.job.verdict.decision, answer.job.state) == ("best_effort", "admitted")
    assert answer.job.state_reason == "amended: best effort, value 1"
    answer = world.amend(job.job.job_id, AmendRequest(claim=job.claim, deadline_at=world.now_s + 900))
    assert (answer.accepted, answer.job.verdict.decision) == (True, "admitted")
    assert world.ended(job).result.met
    assert world.ended(full).result.met


def test_who_waits_is_told_why_for_its_new_deadline_and_keeps_the_old_one_if_that_is_hopeless(world):
    world.submit(task="full", within=270, steps=3200, min_workers=4, scaling_curve={4: 16.0})
    job = world.submit(task="waits", within=240, steps=640, scaling_curve={4: 32.0}, min_workers=4, on_reject="wait")
    before = job.job.verdict.reason
    answer = world.amend(job.job.job_id, AmendRequest(claim=job.claim, deadline_at=world.now_s + 250))
    assert answer.accepted
    assert answer.job.verdict.reason.startswith("waits for capacity until ")
    assert answer.job.verdict.reason != before
    assert answer.job.state_reason == answer.job.verdict.reason
    answer = world.amend(job.job.job_id, AmendRequest(claim=job.claim, deadline_at=world.now_s + 20))
    assert (answer.accepted, answer.job.state) == (False, "waiting")
    assert answer.job.deadline_at == job.job.deadline_at + 10


def test_who_is_measured_may_give_its_deadline_up_and_trains_on(world):
    job = world.submit(within=900, steps=2000)
    world.until(lambda: world.events(job, "measured"), "a first measurement")
    assert world.status(job).state == "profiling"
    answer = world.amend(job.job.job_id, AmendRequest(claim=job.claim, best_effort=True))
    assert answer.job.verdict.decision == "best_effort"
    assert world.reach(job, "running").best_effort
    assert {g.purpose for g in world.generations(job)[-1:]} == {"train"}
    assert world.ended(job).state == "succeeded"


def test_an_amendment_of_a_job_that_has_succeeded_is_refused(world):
    job = world.submit(within=600, scaling_curve=CURVE)
    world.ended(job)
    answer = world.amend(job.job.job_id, AmendRequest(claim=job.claim, value=2.0))
    assert (answer.accepted, answer.reason) == (False, "the job is over")


@pytest.mark.parametrize("on_reject", ["fail", "renegotiate"])
def test_the_next_attempt_of_a_rejected_job_asks_for_the_deadline_that_was_set(world, on_reject):
    limits = {} if on_reject == "fail" else {"latest_deadline_at": world.now_s + 4}
    hopeless = {"scaling_curve": CURVE, "on_reject": on_reject, "deadline_at": world.now_s + 3, **limits}
    job = world.submit(**hopeless)
    offered_at = world.ended(job).verdict.earliest_deadline_at
    answer = world.amend(job.job.job_id, AmendRequest(claim=job.claim, deadline_at=offered_at + 5))
    assert answer.accepted
    assert answer.reason.startswith(f"the next attempt asks for the deadline {moment(offered_at + 5)}")
    assert world.status(job).state == "rejected"
    (event,) = world.events(job, "amended")
    assert event.data["deadline_at"] == offered_at + 5
    again = world.submit(**hopeless)
    assert again.created
    assert again.job.deadline_at == offered_at + 5
    assert again.job.verdict.decision == "admitted"
    (warning,) = again.warnings
    assert warning.startswith(f"this attempt has the deadline {moment(offered_at + 5)}")
    retried = world.submit(**hopeless)  # The task's own deadline has not come back.
    assert not retried.created
    done = world.ended(job)
    assert (done.state, done.result.met, done.deadline_at) == ("succeeded", True, offered_at + 5)


def test_the_next_attempt_is_best_effort_if_that_was_set(world):
    job = world.submit(within=3, scaling_curve=CURVE)
    assert world.ended(job).state == "rejected"
    assert world.amend(job.job.job_id, AmendRequest(claim=job.claim, best_effort=True)).accepted
    again = world.submit(within=3, scaling_curve=CURVE)
    assert (again.job.verdict.decision, again.job.deadline_at) == ("best_effort", None)
    assert world.ended(job).state == "succeeded"


def test_who_is_told_of_the_end_sets_the_next_attempt_also_while_workers_leave(world):
    job = world.submit(within=900, steps=2000, scaling_curve=CURVE)
    world.reach(job, "running")
    world.job_service.cancel(job.job.job_id, job.claim, "not any more")
    world.until(lambda: world.row(job).ending, "the end is decided", every=0.05)
    assert not world.row(job).terminal
    answer = world.amend(job.job.job_id, AmendRequest(claim=job.claim, best_effort=True))
    assert (answer.accepted, answer.reason.partition(";")[0]) == (True, "the next attempt is best effort")
    assert world.ended(job).state == "cancelled"


@pytest.fixture
def rejected(world):
    """A job that was rejected, and how to set what its next attempt asks for."""
    job = world.submit(within=3, scaling_curve=CURVE)
    assert world.ended(job).state == "rejected"

    def set_to(**terms):
        return world.amend(job.job.job_id, AmendRequest(claim=world.status(job).claim, **terms))

    return job, set_to


def test_what_was_set_for_the_next_attempts_holds_until_it_has_passed(world, rejected):
    job, set_to = rejected
    assert set_to(best_effort=True).accepted
    assert set_to(deadline_at=world.now_s + 300).accepted
    assert set_to(value=3.0).accepted
    until_at = world.now_s + 300
    for _ in range(2):
        again = world.submit(within=3, scaling_curve=CURVE, fake={"fail_at_step": 5})
        assert (again.job.deadline_at, again.job.value) == (until_at, 3.0)
        assert world.ended(job).state == "failed"
    later = world.submit(within=5000, scaling_curve=CURVE, fake={"fail_at_step": 5})
    assert later.job.deadline_at == world.now_s + 5000, "what the DAG asks for, where that is later"
    world.ended(job)
    world.run(300)
    (warning,) = world.submit(within=3, scaling_curve=CURVE).warnings
    assert warning == "this attempt has the value 3, as was set after an earlier one"


def test_what_was_set_for_the_next_attempts_ends_with_a_success(world, rejected):
    job, set_to = rejected
    assert set_to(best_effort=True).accepted
    done = world.submit(within=3, scaling_curve=CURVE)
    assert world.ended(job).state == "succeeded"
    world.job_service.acknowledge(job.job.job_id, done.claim)
    anew = world.submit(within=600, scaling_curve=CURVE)
    assert anew.created
    assert (anew.job.best_effort, anew.warnings) == (False, [])


def test_a_deadline_that_was_changed_while_an_attempt_lived_ends_what_was_set_before(world, rejected):
    job, set_to = rejected
    assert set_to(best_effort=True).accepted
    world.submit(within=3, scaling_curve=CURVE, fake={"fail_at_step": 60})
    assert set_to(deadline_at=world.now_s + 900).accepted
    assert world.ended(job).state == "failed"
    assert not world.submit(within=600, scaling_curve=CURVE).job.best_effort


def test_what_the_next_attempt_would_not_heed_is_refused(world, rejected):
    _, set_to = rejected
    assert set_to(deadline_at=world.now_s - 1).reason.endswith("has passed already")
    assert set_to().reason == "nothing to change was given"
    generous = world.submit(within=5000, scaling_curve=CURVE, task="generous", fake={"fail_at_step": 5})
    whenever = world.submit(scaling_curve=CURVE, task="whenever", fake={"fail_at_step": 5})
    for one, why in ((generous, "the task itself asks for a later deadline"), (whenever, "the task asks for best")):
        assert world.ended(one).state == "failed"
        request = AmendRequest(claim=one.claim, deadline_at=world.now_s + 300)
        answer = world.amend(one.job.job_id, request)
        assert (answer.accepted, answer.reason.startswith(why)) == (False, True), answer.reason
    lives = world.submit(within=600, scaling_curve=CURVE)
    answer = set_to(best_effort=True, next_attempt=True)
    assert (answer.accepted, "meanwhile: look at it first" in answer.reason) == (False, True), "asked for the last one"
    assert world.status(lives).deadline_at == lives.job.deadline_at


# -- code and weights --------------------------------------------------------------------------------------------


def test_changed_code_is_told_with_the_names_of_the_files(world):
    old = world.keep_code({"train.py": "one", "model.py": "one", "same.py": "same"})
    new = world.keep_code({"train.py": "two", "extra.py": "two", "same.py": "same"})
    first = world.submit(within=600, scaling_curve=CURVE, snapshot=old)
    second = world.submit(deadline_at=first.job.deadline_at, scaling_curve=CURVE, snapshot=new)
    assert not second.created
    (warning,) = second.warnings
    assert "extra.py, model.py, train.py" in warning
    assert "same.py" not in warning
    world.run(2)
    (gang,) = world.engine.world.gangs.values()
    assert gang.spec.session.code_dir == str(world.snapshots.path(old)), "what runs is what was submitted first"


def test_a_live_job_goes_on_with_the_packages_and_variables_that_it_was_submitted_with(world):
    first = Command(snapshot=world.sha256, script="train.py", requirements=("numpy==2.0",), env={"A": "1"})
    job = world.submit(within=600, command=first)
    changed = first.model_copy(update={"requirements": ("numpy==2.1",), "env": {"A": "2"}})
    again = world.submit(within=600, command=changed)
    assert (again.created, again.job.incarnation) == (False, job.job.incarnation)
    (warning,) = again.warnings
    assert warning.startswith("requirements=, env= differ from what the job was submitted with")
    assert world.row(job).submission.command.requirements == ("numpy==2.0",)


def test_init_from_latest_takes_the_weights_of_the_last_success_of_another_run(world):
    sunday = world.submit(run="sunday", within=600, scaling_curve=CURVE, init_from="latest")
    assert "starts fresh" in world.events(sunday, "initialised")[0].reason
    weights = world.ended(sunday).result.checkpoint_path
    monday = world.submit(run="monday", within=600, scaling_curve=CURVE, init_from="latest")
    world.reach(monday, "running")
    (gang,) = [g for g in world.engine.world.gangs.values() if g.spec.job_id == monday.job.job_id]
    assert gang.spec.session.init_from == weights
    assert world.status(monday).step < 200, "weights only: yesterday's end does not make today's done"
    assert world.ended(monday).state == "succeeded"
    other = world.submit(task="other", within=600, scaling_curve=CURVE, init_from="latest")
    assert world.row(other).init_from_path is None, "of the same task only"


def test_init_from_a_folder_that_is_not_there_fails_with_its_name(world):
    job = world.submit(within=600, scaling_curve=CURVE, init_from="/nowhere/at/all")
    done = world.ended(job)
    assert done.state == "failed"
    assert "init_from=/nowhere/at/all: there is no such checkpoint folder" in done.failure


def test_the_next_run_of_a_task_has_an_id_of_its_own(world):
    first = world.submit(run="sunday", within=600, scaling_curve=CURVE)
    second = world.submit(run="monday", within=600, scaling_curve=CURVE)
    assert first.job.job_id != second.job.job_id
    assert json.loads(world.row(first).signature) == json.loads(world.row(second).signature)


# -- what is refused at once -------------------------------------------------------------------------------------


def refused(world, submission, job_id=None):
    with pytest.raises(Refusal) as caught:
        world.job_service.submit(job_id or submission.identity.job_id, submission)
    assert caught.value.hint, "every refusal says what to do"
    with world.store.read() as reader:
        assert reader.job(submission.identity.job_id) is None, "a refused submit leaves nothing"
    return caught.value


def test_a_submission_must_go_to_the_id_of_its_identity(world):
    assert refused(world, world.submission(), "another-id").status == 422


def test_code_that_was_not_uploaded_is_refused(world):
    assert refused(world, world.submission(snapshot="f" * 64)).error == "snapshot_missing"


@pytest.mark.parametrize("script", ["missing.py", "../../secret.key", "/etc/passwd", "."])
def test_a_script_must_be_in_the_uploaded_code(world, script):
    command = Command(snapshot=world.sha256, script=script)
    error = refused(world, world.submission(command=command))
    assert error.error == "script_missing"
    assert repr(script) in error.message


def test_an_interpreter_that_is_missing_is_named(world):
    command = Command(snapshot=world.sha256, script="train.py", python="/no/such/python")
    error = refused(world, world.submission(command=command))
    assert error.error == "interpreter_missing"
    assert "/no/such/python" in error.message


def test_more_workers_than_there_are_slots_never_fit(world):
    world.step()
    error = refused(world, world.submission(min_workers=8))
    assert "min_workers=8 never fits: the cluster has 4 slots" in error.message


def test_epochs_are_counted_in_whole_steps(world):
    job = world.submit(within=600, scaling_curve=CURVE, length=Length(epochs=3, samples=33))
    assert world.status(job).total_steps == 6, "of two batches of 32 the second is short"
    assert world.ended(job).result.steps == 6

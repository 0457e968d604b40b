"""What the pages ask of the service: the cluster now and over time, the story of a job, its runs beside each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median

import pytest
from support.service_parts import insight_of

from elasticflow_airflow.api import Command
from elasticflow_airflow.api.insight import CalendarRequest, DueRuns
from elasticflow_airflow.service.refusal import Refusal
from elasticflow_airflow.service.requests.timetable_intake import CalendarService
from elasticflow_airflow.service.secrets import secrets_in_args, shown_args

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
LONG = {"steps": 32 * 600, "scaling_curve": CURVE}
"""Ten minutes of the whole cluster."""


def running(world, **given):
    job = world.submit(**{**LONG, **given})
    world.reach(job, "running")
    return job


# -- now ---------------------------------------------------------------------------------------------------------


def test_the_cluster_now_names_every_slot_and_every_live_job(world):
    job = running(world, task="nightly", within=780.0)
    waiting = world.submit(task="adhoc", **LONG)
    done = world.submit(task="tiny", within=1.0, scaling_curve=CURVE)
    assert done.job.verdict.decision == "rejected"
    world.step(1.0)
    now = insight_of(world).cluster()
    assert now.at == world.now_s
    assert [(slot.node_id, slot.index) for slot in now.slots] == [("node0", index) for index in range(4)]
    assert {slot.job_id for slot in now.slots} == {job.job.job_id}
    assert {one.job_id for one in now.jobs} == {job.job.job_id, waiting.job.job_id}
    assert now.why.keys() == {job.job.job_id, waiting.job.job_id}
    assert "daily.nightly" in now.why[waiting.job.job_id]


def test_it_says_the_same_of_a_job_as_its_status(world):
    job = running(world)
    assert insight_of(world).cluster().jobs == [world.status(job)]


# -- over time ---------------------------------------------------------------------------------------------------


def test_history_adds_up_what_was_held_and_what_computed(world):
    began = world.now_s
    job = running(world, steps=32 * 60)
    world.ended(job)
    history = insight_of(world).history(began, world.now_s, 10)
    assert len(history.held_slot_s) == len(history.computing_slot_s) == 10
    assert history.part_s == pytest.approx((world.now_s - began) / 10)
    assert sum(history.held_slot_s) == pytest.approx(world.status(job).result.gpu_seconds, rel=0.02)
    assert 0.5 * sum(history.held_slot_s) < sum(history.computing_slot_s) < sum(history.held_slot_s)
    assert all(part <= 4 * history.part_s + 1e-6 for part in history.held_slot_s)
    (admission,) = history.admissions
    assert (admission.decision, admission.started_at is not None) == ("best_effort", True)
    assert admission.decided_at is not None
    assert admission.submitted_at <= admission.decided_at <= admission.started_at < admission.finished_at
    assert history.planned == []
    assert history.complete


def test_history_shows_what_is_planned_from_now_on(world):
    first = running(world, task="first", within=3600.0)
    second = world.submit(task="second", within=2 * 3600.0, **LONG)
    history = insight_of(world).history(world.now_s - 3600, world.now_s + 3 * 3600, 96)
    planned = {span.job_id: span for span in history.planned}
    assert planned.keys() == {first.job.job_id, second.job.job_id}
    assert all(span.from_at >= world.now_s for span in history.planned)
    assert all(len(span.slots) == span.workers for span in history.planned)
    for one in history.planned:
        for other in history.planned:
            if one is not other and one.from_at < other.until_at and other.from_at < one.until_at:
                assert not set(one.slots) & set(other.slots)


def test_history_knows_room_that_is_kept_free_for_a_run_that_is_expected(world):
    due = world.now_s + 3600.0
    first = world.submit(task="nightly", run="r1", steps=2000, within=600.0, scaling_curve=CURVE, next_run_at=due)
    assert world.ended(first, every=5.0).state == "succeeded"
    world.step(due - 600.0 - world.now_s)
    world.submit(task="adhoc", within=7200.0, **LONG)
    expected = [s for s in insight_of(world).history(None, None, 10).planned if s.purpose == "expected"]
    assert [(s.dag_id, s.task_id, s.job_id) for s in expected][:1] == [("daily", "nightly", "")]
    assert expected[0].from_at >= due


def test_history_is_only_of_the_time_that_was_asked_for(world):
    began = world.now_s
    job = running(world, steps=32 * 60)
    world.ended(job, every=2.0)
    ended = world.now_s
    world.step(1000.0)
    assert insight_of(world).history(ended + 1, world.now_s, 4).spans == []
    part = insight_of(world).history(began, began + 30.0, 1)
    assert len(part.spans) == 1
    assert part.held_slot_s[0] <= 4 * 30.0


@pytest.mark.parametrize(
    ("from_at", "until_at", "says"), [(10.0, 10.0, "is not after"), (0.0, 32 * 86400.0, "at most 31 days")]
)
def test_history_refuses_moments_that_make_no_sense(world, from_at, until_at, says):
    with pytest.raises(Refusal) as refused:
        insight_of(world).history(from_at, until_at, 4)
    assert refused.value.status == 422
    assert says in f"{refused.value.message} {refused.value.hint}"


def test_a_change_in_place_shows_no_slot_twice(world):
    fake = {"in_place": True}
    job = world.submit(task="long", fake=fake, within=3600.0, **LONG)
    world.reach(job, "running")
    world.run(30.0, every=2.0)
    other = world.submit(task="other", within=700.0, steps=32 * 120, scaling_curve=CURVE)
    world.until(lambda: world.status(other).state == "running", "the other runs")
    world.run(20.0)
    history = insight_of(world).history(world.now_s - 3600, world.now_s, 10)
    assert len(history.spans) >= 3
    for one in history.spans:
        for another in history.spans:
            if one is not another and one.job_id == another.job_id:
                end, begin = one.until_at or world.now_s, another.from_at
                assert not (one.from_at <= begin < end - 0.6 and set(one.slots) & set(another.slots)), (one, another)
    assert sum(history.computing_slot_s) <= sum(history.held_slot_s)


# -- why ---------------------------------------------------------------------------------------------------------


def why(world, job) -> str:
    return insight_of(world).cluster().why[job.job.job_id]


def test_why_names_who_needs_the_other_slots_and_until_when(world):
    first = world.submit(task="first", within=3600.0, **LONG)
    assert why(world, first).startswith("is starting on 4 slots until its end at ")
    world.reach(first, "running")
    assert why(world, first).startswith("holds 4 slots until its end at 08:1")
    assert why(world, first).endswith("before its deadline: no more exist")
    second = world.submit(task="second", within=900.0, steps=32 * 300, scaling_curve=CURVE)
    world.run(30.0, every=2.0)
    assert why(world, first).endswith("before its deadline: daily.second needs the others until then")
    assert "holds 2 slots until its end at " in why(world, second)
    urgent = world.submit(task="urgent", within=1400.0, steps=32 * 500, scaling_curve=CURVE)
    world.run(30.0, every=2.0)
    assert urgent.job.verdict.decision == "admitted"
    said = why(world, first)
    assert said.startswith("waits until 08:"), said
    assert "then it gets" in said
    assert "daily.urgent" in said
    assert insight_of(world).story(first.job.job_id, None).why == said


def test_why_says_that_more_would_not_help(world):
    curve = {1: 10.0, 2: 18.0, 4: 17.0}
    job = running(world, scaling_curve=curve, fake={"steps_per_s": curve}, within=7200.0)
    assert why(world, job).endswith(": with more it would not be faster")
    other = running(world, task="other", max_workers=1)
    assert why(world, other).endswith(": max_workers=1")


def test_it_is_said_why_a_job_does_not_grow_onto_idle_slots_yet(make_world):
    world = make_world(slots=2)
    fake = {"startup_s": 6.0}
    job = world.submit(task="long", best_effort=True, steps=10_000, scaling_curve={1: 10.0, 2: 18.0}, fake=fake)
    brief = world.submit(task="brief", best_effort=True, scaling_curve={1: 10.0}, max_workers=1)
    world.job_service.cancel(brief.job.job_id, brief.claim, "was brief")
    world.run(3)
    assert why(world, job).endswith(": its last start or change is not done yet")
    world.until(lambda: world.status(job).step > 0, "it trains")
    assert "it has to make up for the pause of its last change first, until " in why(world, job)
    world.until(lambda: world.generations(job)[-1].workers == 2, "then it grows", 60)


def test_why_names_the_run_for_which_slots_are_kept_free(world):
    due = world.now_s + 3600.0
    first = world.submit(task="nightly", run="r1", steps=32 * 300, within=600.0, scaling_curve=CURVE, next_run_at=due)
    assert world.ended(first, every=10.0).state == "succeeded"
    world.step(due - 900.0 - world.now_s)
    job = running(world, task="adhoc", within=7200.0, steps=32 * 3000)
    assert "the run of daily.nightly that is due 09:00 UTC" in why(world, job)


def test_why_says_whose_the_tasks_are_that_it_names(world):
    due = world.now_s + 3600.0
    curve = {"scaling_curve": CURVE, "within": 600.0}
    nightly = world.submission(task="nightly", run="r1", steps=32 * 300, next_run_at=due, **curve)
    of_others = nightly.identity.model_copy(update={"namespace": "elsewhere", "dag_id": "secretteam_eu"})
    first = world.attached(
        world.job_service.submit(of_others.job_id, nightly.model_copy(update={"identity": of_others}))
    )
    assert world.ended(first, every=10.0).state == "succeeded"
    world.step(due - 900.0 - world.now_s)
    job = running(world, task="adhoc", within=7200.0, min_workers=4, steps=32 * 3000)
    waiting = world.submit(task="spare", **LONG)
    world.step(1.0)
    now = insight_of(world).cluster()
    told = {
        job_id: [(said[one.at : one.at + one.length], one.namespace, one.dag_id) for one in now.why_names[job_id]]
        for job_id, said in now.why.items()
    }
    expected, adhoc = ("secretteam_eu.nightly", "elsewhere", "secretteam_eu"), ("daily.adhoc", "default", "daily")
    assert told == {job.job.job_id: [expected], waiting.job.job_id: [adhoc, expected]}, now.why
    story = insight_of(world).story(waiting.job.job_id, None)
    assert (story.why, story.why_names) == (now.why[waiting.job.job_id], now.why_names[waiting.job.job_id])


def test_why_tells_of_measuring_waiting_and_an_owner_who_is_away(world):
    urgent = running(world, task="urgent", within=780.0)
    job = world.submit(task="new", within=4 * 3600.0, steps=32 * 1800)
    assert why(world, job) == "waits for slots that no promise needs, to measure its speed on them"
    world.job_service.cancel(urgent.job.job_id, urgent.claim, "")
    world.until(lambda: world.status(job).state == "profiling", "it is measured")
    assert why(world, job).startswith("measures its speed with ")
    world.until(lambda: world.row(job).parked, "nobody asks for it", 1000.0, every=5.0)
    assert "its owner in Airflow is silent" in why(world, job)
    assert world.status(job).lease_expires_at < world.now_s


# -- one job -----------------------------------------------------------------------------------------------------


def test_a_story_has_everything_and_no_secret(world):
    submission = world.submission(task="nightly", within=3600.0, secret_env={"TOKEN": "hunter2"}, **LONG)
    submission = submission.model_copy(
        update={"command": submission.command.model_copy(update={"env": {"PASSWORD": "hunter2"}})}
    )
    job = world.attached(world.job_service.submit(submission.identity.job_id, submission))
    world.reach(job, "running")
    world.run(40.0, every=1.0)
    story = insight_of(world).story(job.job.job_id, None)
    assert story.status == world.status(job)
    assert story.incarnations == 1
    assert story.submission["length"] == {"steps": LONG["steps"], "epochs": None, "samples": None}
    assert story.submission["command"]["env"] == ["PASSWORD"]
    assert "hunter2" not in story.model_dump_json()
    assert [span.generation for span in story.generations] == [1]
    assert story.generations[0].running_at is not None
    assert story.planned
    assert len(story.samples) > 10
    assert [point.workers for point in story.curve] == [1, 2, 4]
    assert story.curve[-1].measured_steps_per_s == pytest.approx(32.0, rel=0.1)
    assert all(point.reckoned_steps_per_s for point in story.curve)


def test_a_story_tells_with_what_a_run_can_be_repeated(world):
    job = running(world, within=780.0)
    told = insight_of(world).story(job.job.job_id, None).trained_with
    assert told.submitted == {
        "consistency": "consistent",
        "global_batch_size": 32,
        "logical_workers": 8,
        "seed": 0,
        "steps": 19200,
    }
    assert told.code_dir.startswith(str(world.settings.state_dir))
    assert (told.threads, told.threads_differed, told.micro_batch_changed) == (None, False, False)
    with world.store.write() as writer:
        (first,) = writer.generations(job.job.job_id, 1)
        first.notes = replace(first.notes, threads=2)
    assert insight_of(world).story(job.job.job_id, None).trained_with.threads == 2


def test_a_story_shows_no_secret_of_the_arguments(world):
    args = ("--token=hunter2", "https://me:hunter2@hub/x", "--data", "s3://b/d", "--api-key", "hunter2", "-v")
    job = world.submit(args=args, **LONG)
    told = insight_of(world).story(job.job.job_id, None).submission["command"]
    shown = ["--token=***", "https://me:***@hub/x", "--data", "s3://b/d", "--api-key", "***", "-v"]
    assert told["args"] == shown
    assert "args_shown" not in told


def test_a_story_shows_of_the_arguments_what_their_submitter_would(world):
    fake = {"fail_at_step": 5, "failure": "TypeError: no 'hunter22' in /data"}
    submission = world.submission(args=("/data", "hunter22", "x=hunter22;y"), fake=fake, **LONG)
    command = {**submission.command.model_dump(), "args_shown": ("/data", "***", "x=***;y")}
    submission = submission.model_copy(update={"command": Command.model_validate(command)})
    job = world.attached(world.job_service.submit(submission.identity.job_id, submission))
    assert world.ended(job).state == "failed"
    story = insight_of(world).story(job.job.job_id, None)
    assert story.submission["command"]["args"] == ["/data", "***", "x=***;y"]
    assert "no '***' in /data" in (story.status.failure or "")
    assert "hunter22" not in story.model_dump_json() + "".join(world.story())


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (["--hub_token", "abc"], ["--hub_token", "***"]),
        (["--hubToken", "abc"], ["--hubToken", "***"]),
        (["-secret", "abc", "def"], ["-secret", "***", "def"]),
        (["hub.password=a=b"], ["hub.password=***"]),
        (["--credentials", "abc"], ["--credentials", "***"]),
        (["--use-auth-token", "--lr", "3"], ["--use-auth-token", "--lr", "3"]),
        (["--tokenizer", "bert", "--max-tokens", "9"], ["--tokenizer", "bert", "--max-tokens", "9"]),
        (["--password-file", "/run/secret"], ["--password-file", "/run/secret"]),
        (["token", "abc", "--token"], ["token", "abc", "--token"]),
    ],
    ids=" ".join,
)
def test_options_that_are_called_like_secrets_keep_their_values(args, shown):
    assert shown_args(args, None) == shown


def test_a_story_knows_the_checkpoint_that_counts(world):
    job = world.submit(steps=320, scaling_curve=CURVE)
    world.ended(job)
    story = insight_of(world).story(job.job.job_id, 1)
    assert [one.promoted for one in story.checkpoints].count(True) == 1
    assert story.why == world.status(job).state_reason
    assert story.planned == []


def test_a_story_tells_where_the_time_of_each_worker_went(world):
    job = running(world, fake={"slow_slots": {"node0:0": 1.01}}, within=3600.0)
    world.run(40.0, every=1.0)
    story = insight_of(world).story(job.job.job_id, None)
    assert [one.rank for one in story.workers] == [0, 1, 2, 3]
    assert len({one.worker_id for one in story.workers}) == 4
    assert all(one.compute_s > 0.0 and one.window_steps > 0 for one in story.workers)
    assert all(world.now_s - 30.0 < one.at <= world.now_s for one in story.workers)


def test_a_story_of_an_earlier_incarnation_can_be_asked_for(world):
    job = world.submit(steps=320, scaling_curve=CURVE)
    world.ended(job)
    world.job_service.acknowledge(job.job.job_id, job.claim)
    again = world.submit(steps=320, scaling_curve=CURVE)
    assert again.job.incarnation == 2
    world.reach(again, "running")
    first, second = (insight_of(world).story(job.job.job_id, number) for number in (1, 2))
    assert (first.status.state, second.status.state) == ("succeeded", "running")
    assert first.incarnations == second.incarnations == 2
    assert first.planned == []
    assert first.status.incarnation == 1


@pytest.mark.parametrize(("job_id", "incarnation"), [("nobody", None), (None, 7)])
def test_a_story_of_nobody_is_refused(world, job_id, incarnation):
    job = world.submit(**LONG)
    with pytest.raises(Refusal) as refused:
        insight_of(world).story(job_id or job.job.job_id, incarnation)
    assert refused.value.status == 404


def test_the_runs_of_a_task_stand_beside_each_other(world):
    jobs = []
    for number in (1, 2, 3):
        world.step(100.0)
        jobs.append(world.submit(task="nightly", run=f"r{number}", steps=320, scaling_curve=CURVE))
        world.ended(jobs[-1], every=2.0)
    world.submit(task="other", run="r1", **LONG)
    runs = insight_of(world).runs(jobs[0].job.job_id, 10)
    assert [run.run_id for run in runs] == ["r3", "r2", "r1"]
    assert all(run.samples and run.samples[0].at < 60.0 for run in runs)
    assert runs[0].slot_s == pytest.approx(world.status(jobs[2]).result.gpu_seconds)
    assert [run.run_id for run in insight_of(world).runs(jobs[0].job.job_id, 2)] == ["r3", "r1"]


# -- both databases ----------------------------------------------------------------------------------------------


def test_both_databases_answer_alike(make_world, database_url):
    world = make_world(url=database_url)
    job = world.submit(task="nightly", steps=320, within=600.0, scaling_curve=CURVE)
    world.ended(job, every=2.0)
    world.submit(task="adhoc", **LONG)
    world.run(5.0, every=1.0)
    insight = insight_of(world)
    assert len(insight.cluster().jobs) == 1
    history = insight.history(None, None, 4)
    assert len({span.job_id for span in history.spans}) == len(history.admissions) == 2
    assert all(one.decided_at and one.started_at for one in history.admissions)
    assert insight.story(job.job.job_id, None).samples
    assert [run.met for run in insight.runs(job.job.job_id, 5)] == [True]
    calendar = CalendarService(world.store, world.settings, world.reconciler.hear_of_runs, clock=world.clock)
    due = DueRuns(dag_id="daily", task_id="nightly", due_at=[world.now_s + 3600.0])
    assert calendar.feed(CalendarRequest(tasks=[due])).taken == 1
    world.until(lambda: world.row(job).drained, "the engine has forgotten it")
    world.step(91 * 86400.0)
    assert world.generations(job) == []
    assert insight.story(job.job.job_id, None).samples == []


def test_sums_are_of_all_that_was_also_where_not_all_is_told(make_world, database_url, monkeypatch):
    world = make_world(url=database_url)
    began = world.now_s
    long = world.submit(task="long", fake={"in_place": True}, within=3600.0, **LONG)
    world.reach(long, "running")
    world.run(20.0, every=2.0)
    for number in range(3):
        job = world.submit(task="short", run=f"r{number}", within=400.0, steps=640, scaling_curve=CURVE)
        world.ended(job, every=2.0)
    world.submit(task="hopeless", within=1.0, scaling_curve=CURVE)
    other = world.submission(task="loose", steps=32 * 600, scaling_curve=CURVE)
    whose = other.identity.model_copy(update={"namespace": "elsewhere", "dag_id": "weekly"})
    world.job_service.submit(whose.job_id, other.model_copy(update={"identity": whose}))
    world.run(10.0, every=2.0)
    insight = insight_of(world)
    full = insight.history(began + 10.0, world.now_s, 7)
    assert (full.complete, full.spans_from_at, full.admissions_from_at) == (True, None, None)
    for dag in full.by_dag:
        asked = [one for one in full.admissions if (one.namespace, one.dag_id) == (dag.namespace, dag.dag_id)]
        waits = [one.started_at - one.submitted_at for one in asked if one.started_at is not None]
        assert dag.runs == len(asked)
        assert dag.rejected == sum(one.decision == "rejected" for one in asked)
        assert (dag.judged, dag.met) == (
            sum(one.met is not None for one in asked),
            sum(one.met is True for one in asked),
        )
        assert dag.median_wait_s == (pytest.approx(median(waits)) if waits else None)
    daily, weekly = sorted(full.by_dag, key=lambda one: one.dag_id)
    assert (daily.dag_id, daily.runs, daily.rejected, daily.judged, daily.met) == ("daily", 5, 1, 3, 3)
    assert (weekly.namespace, weekly.dag_id, weekly.runs, weekly.judged) == ("elsewhere", "weekly", 1, 0)
    assert daily.slot_s + weekly.slot_s == pytest.approx(sum(full.held_slot_s))
    assert daily.slot_s > weekly.slot_s

    monkeypatch.setattr("elasticflow_airflow.service.requests.insight_service.MOST_ROWS", 2)
    cut = insight.history(began + 10.0, world.now_s, 7)
    assert not cut.complete
    assert len(cut.admissions) == 2 < len(full.admissions)
    assert len(cut.spans) < len(full.spans)
    assert cut.admissions_from_at == min(one.submitted_at for one in cut.admissions)
    assert began < cut.spans_from_at <= min(span.from_at for span in cut.spans)
    for dag, same in zip(cut.by_dag, full.by_dag, strict=True):
        assert dag.model_copy(update={"slot_s": 0.0}) == same.model_copy(update={"slot_s": 0.0})
        assert dag.slot_s == pytest.approx(same.slot_s)
    assert cut.held_slot_s == pytest.approx(full.held_slot_s)
    assert cut.computing_slot_s == pytest.approx(full.computing_slot_s)


def test_secrets_among_arguments_are_found_in_no_time_whatever_their_submitter_shows():
    """Who shows what does not fit the arguments gets all of it hidden; nothing is tried again and again."""
    fits = secrets_in_args(
        ["--url=http://me:hunter22@hub/x?k=abcd", "same"], ["--url=http://me:***@hub/x?k=***", "same"]
    )
    assert list(fits.values()) == ["hunter22", "abcd"]
    args, shown = ["xxa" * 500 + "a" * 3000 + "b"], ["***a" * 500]
    assert list(secrets_in_args(args, shown).values()) == args
    assert list(secrets_in_args(["ab"], ["***"]).values()) == ["ab"]


@pytest.mark.trouble
def test_who_asks_what_is_planned_never_waits_for_a_pass(world):
    """He sees what the last pass has decided, also while the next one thinks, or fails."""
    job = world.submit(within=900, steps=1500, scaling_curve={1: 10.0})
    world.run(5)
    before = world.reconciler.foresee()
    assert before is not None
    assert job.job.job_id in before.states
    with world.reconciler._thinking:
        assert run_in_thread(world.reconciler.foresee) is before
    world.engine.fail_next("observe", "no")
    world.step(1.0)
    assert world.reconciler.problem
    assert world.reconciler.foresee() is before
    other = world.submit(task="other", within=900, steps=100, scaling_curve={1: 10.0})
    assert other.job.job_id in world.reconciler.foresee().states


def run_in_thread(do):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result(timeout=10)

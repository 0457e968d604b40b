"""What if: the outlook with other deadlines or nodes, asked of a copy; and timetables that Airflow tells at once."""

from __future__ import annotations

import json

import pytest

from elasticflow_airflow.api.insight import (
    CalendarRequest,
    DeadlineChange,
    DueRuns,
    TaskOfNamespace,
    WhatIfRequest,
    WholeNamespace,
)
from elasticflow_airflow.service.refusal import Refusal
from elasticflow_airflow.service.requests import timetable_intake
from elasticflow_airflow.service.requests.forecasting import ForecastService
from elasticflow_airflow.service.requests.timetable_intake import CalendarService
from elasticflow_airflow.service.requests.whatif import WhatIfService

HOUR_S = 3600.0
CURVE = {1: 10.0, 2: 18.0, 4: 32.0}


def service_of(world) -> WhatIfService:
    return WhatIfService(
        ForecastService(world.store, world.settings, world.reconciler.copy_scheduler, lambda: "", clock=world.clock)
    )


def ask(world, *changes: tuple[str, float | None], **given):
    asked = [DeadlineChange(job_id=job_id, deadline_at=deadline) for job_id, deadline in changes]
    return service_of(world).ask(WhatIfRequest(changes=asked, **given))


def hour_long(world, task: str, within: float):
    """A job that keeps the whole cluster busy for half an hour."""
    return world.submit(task=task, within=within, steps=32 * 1800, scaling_curve=CURVE)


# -- deadlines ---------------------------------------------------------------------------------------------------


def test_a_later_deadline_can_be_promised_and_nothing_is_changed(world):
    job = hour_long(world, "nightly", HOUR_S)
    before = (world.status(job), world.events())
    later = world.now_s + 2 * HOUR_S
    answer = ask(world, (job.job.job_id, later))
    (said,) = answer.verdicts
    assert (said.job_id, said.verdict.decision, said.verdict.deadline_at) == (job.job.job_id, "admitted", later)
    assert said.verdict.plan
    assert [item.deadline_at for item in answer.before.items] == [job.job.deadline_at]
    assert [item.deadline_at for item in answer.after.items] == [later]
    world.step()
    assert world.status(job).deadline_at == job.job.deadline_at == before[0].deadline_at
    assert world.events() == before[1]


def test_a_deadline_that_is_too_early_is_refused_with_one_that_would_do(world):
    job = hour_long(world, "nightly", 2 * HOUR_S)
    (said,) = ask(world, (job.job.job_id, world.now_s + 600.0)).verdicts
    assert said.verdict.decision == "rejected"
    assert said.verdict.earliest_deadline_at is not None
    assert said.verdict.earliest_deadline_at > world.now_s + 600.0
    assert said.verdict.reason


def test_without_its_deadline_a_job_makes_room_for_another(world):
    first = hour_long(world, "first", HOUR_S)
    second = hour_long(world, "second", 2 * HOUR_S)
    sooner = world.now_s + 0.8 * HOUR_S
    (alone,) = ask(world, (second.job.job_id, sooner)).verdicts
    assert alone.verdict.decision == "rejected"
    answer = ask(world, (first.job.job_id, None), (second.job.job_id, sooner))
    assert [said.verdict.decision for said in answer.verdicts] == ["best_effort", "admitted"]
    assert len(answer.before.items) == 2
    assert len(answer.after.items) == 1


def test_a_job_that_is_still_measured_stays_undecided(world):
    job = world.submit(task="new", within=HOUR_S, steps=3200)
    assert world.status(job).state == "profiling"
    (said,) = ask(world, (job.job.job_id, world.now_s + 2 * HOUR_S)).verdicts
    assert said.verdict.decision == "undecided"


# -- nodes -------------------------------------------------------------------------------------------------------


def test_without_a_node_a_promise_is_at_risk_and_with_more_it_is_kept(make_world):
    world = make_world(nodes=2, slots=2)
    jobs = [hour_long(world, name, 0.8 * 2 * HOUR_S) for name in ("a", "b")]
    assert all(job.job.verdict.decision == "admitted" for job in jobs)
    fewer = ask(world, without_nodes=["node1"])
    assert fewer.before.not_kept == 0
    assert fewer.after.not_kept > 0
    assert fewer.after.missing_slots
    swapped = ask(world, without_nodes=["node1"], extra_nodes=1)
    assert swapped.after.not_kept == 0
    assert len(world.reconciler.copy_scheduler().nodes()) == 2


def test_what_makes_no_sense_is_refused(world):
    job = hour_long(world, "nightly", HOUR_S)
    done = world.submit(task="tiny", within=1.0, scaling_curve=CURVE)
    world.step(1.0)
    cases = [
        ({"without_nodes": ["elsewhere"]}, 422, "without_nodes: there is no node 'elsewhere'"),
        ({"changes": [("nobody", None)]}, 404, "there is no job 'nobody'"),
        ({"changes": [(done.job.job_id, None)]}, 409, "is over"),
        ({"changes": [(job.job.job_id, None), (job.job.job_id, None)]}, 422, "is there twice"),
    ]
    for given, status, says in cases:
        with pytest.raises(Refusal) as refused:
            ask(world, *given.pop("changes", ()), **given)
        assert (refused.value.status, says in refused.value.message) == (status, True)


def test_a_question_that_takes_too_long_is_refused_and_says_what_can_be_asked(world):
    world.step()
    now_s = iter(range(1000))
    service = WhatIfService(service_of(world).forecasts, monotonic=lambda: float(next(now_s)))
    with pytest.raises(Refusal) as refused:
        service.ask(WhatIfRequest(extra_nodes=100))
    assert (refused.value.status, refused.value.error) == (422, "too_large")
    assert "after 5 s 5 of 100 changes" in refused.value.message
    assert "some 2 are worked out" in refused.value.hint
    assert ask(world, extra_nodes=3).after.not_kept == 0


# -- timetables --------------------------------------------------------------------------------------------------


def feed(world, *tasks: DueRuns, whole: WholeNamespace | None = None):
    service = CalendarService(world.store, world.settings, world.reconciler.hear_of_runs, clock=world.clock)
    answer = service.feed(CalendarRequest(tasks=list(tasks), whole=whole))
    world.step()
    return answer


def due(task: str, *at: float) -> DueRuns:
    return DueRuns(dag_id="daily", task_id=task, due_at=list(at))


def expected(world) -> list[float]:
    return [run.due_s for run in world.reconciler.copy_scheduler().expected_runs()]


def known_task(world, **given):
    job = world.submit(
        task="nightly", run="r1", steps=2000, within=180.0, scaling_curve=CURVE, due_at=world.now_s, **given
    )
    assert world.ended(job, every=2.0).state == "succeeded"
    return job


def test_runs_of_a_task_with_a_history_are_expected(world):
    known_task(world, next_run_at=world.now_s + 9 * HOUR_S)
    times = [world.now_s + HOUR_S, world.now_s + 2 * HOUR_S]
    answer = feed(world, due("nightly", *times), due("brand-new", *times))
    assert (answer.taken, answer.unknown) == (2, ["daily.brand-new"])
    assert expected(world) == times
    answer = feed(world, due("nightly", times[1]))
    assert expected(world) == times[1:]
    world.restart()
    world.step()
    assert expected(world) == times[1:]
    feed(world, due("nightly"))
    assert expected(world) == []


def all_of(world, *tasks: TaskOfNamespace, namespace: str = "default", ago: float = 0.0) -> WholeNamespace:
    return WholeNamespace(namespace=namespace, read_at=world.now_s - ago, tasks=list(tasks))


def due_tasks(world) -> set[str]:
    with world.store.read() as reader:
        return {row.recurring_key for row in reader.recurring_tasks()}


def test_nothing_is_kept_free_for_tasks_that_are_no_more(world):
    known_task(world, next_run_at=world.now_s + 2 * HOUR_S)
    assert len(expected(world)) == 1
    answer = feed(world, due("other", world.now_s + HOUR_S))
    assert (len(expected(world)), answer.forgotten) == (1, [])  # that is not all there is
    other = TaskOfNamespace(dag_id="daily", task_id="other", map_indexes=[-1])
    answer = feed(world, whole=all_of(world, other))
    assert (expected(world), answer.forgotten) == ([], ["daily.nightly"])
    assert len(due_tasks(world)) == 1
    assert feed(world, whole=all_of(world, other)).forgotten == []


def test_what_is_named_stays_expected(world):
    known_task(world, next_run_at=world.now_s + 2 * HOUR_S)
    for indexes in ([-1], None):
        task = TaskOfNamespace(dag_id="daily", task_id="nightly", map_indexes=indexes)
        assert feed(world, whole=all_of(world, task)).forgotten == []
    when = world.now_s + HOUR_S
    assert feed(world, due("nightly", when), whole=all_of(world)).forgotten == []
    assert expected(world) == [when]


def test_another_airflows_namespace_is_left_alone(world):
    when = world.now_s + HOUR_S
    feed(world, DueRuns(namespace="theirs", dag_id="daily", task_id="train", due_at=[when]), due("ours", when))
    assert feed(world, whole=all_of(world)).forgotten == ["daily.ours"]
    assert {json.loads(key)[0] for key in due_tasks(world)} == {"theirs"}


def test_instances_that_a_mapped_task_has_no_more_are_forgotten(world):
    when = world.now_s + HOUR_S
    runs = [DueRuns(dag_id="daily", task_id="many", map_index=index, due_at=[when]) for index in range(3)]
    feed(world, *runs)
    now_two = TaskOfNamespace(dag_id="daily", task_id="many", map_indexes=[0, 1])
    assert feed(world, whole=all_of(world, now_two)).forgotten == ["daily.many[2]"]


def test_a_task_that_was_heard_of_since_is_not_forgotten(world):
    known_task(world, next_run_at=world.now_s + 2 * HOUR_S)
    assert feed(world, whole=all_of(world, ago=HOUR_S)).forgotten == []
    assert len(expected(world)) == 1


def test_a_run_that_is_due_already_may_still_come_of_a_task_that_is_no_more(world):
    when = world.now_s + HOUR_S
    known_task(world, next_run_at=when)
    world.step(when + 30.0 - world.now_s)
    assert feed(world, whole=all_of(world)).forgotten == []
    assert expected(world) == [when]


def test_a_run_that_has_come_is_not_expected_again(world):
    when = world.now_s + HOUR_S
    known_task(world, next_run_at=when)
    world.step(when - world.now_s - 5.0)
    again = world.submit(task="nightly", run="r2", steps=2000, within=300.0, scaling_curve=CURVE)
    assert expected(world) == []
    feed(world, due("nightly", when, when + HOUR_S))
    assert expected(world) == [when + HOUR_S]
    assert again.job.verdict.decision == "admitted"


def test_what_is_due_and_has_not_come_stays_expected(world):
    when = world.now_s + HOUR_S
    known_task(world, next_run_at=when)
    world.step(when + 30.0 - world.now_s)
    feed(world, due("nightly", when + HOUR_S))
    assert expected(world) == [when, when + HOUR_S]


def test_a_forecast_knows_what_was_fed(world):
    known_task(world, next_run_at=world.now_s + 9 * HOUR_S)
    feed(world, due("nightly", world.now_s + HOUR_S), due("brand-new", world.now_s + HOUR_S))
    items = service_of(world).forecasts.forecast(3.0).items
    assert {(item.task, item.outcome) for item in items} == {("daily.nightly", "kept"), ("daily.brand-new", "unknown")}


def test_a_calendar_that_cannot_be_meant_is_refused(world, monkeypatch):
    cases = [
        ([due("a", 1.0), due("a", 2.0)], "daily.a is there twice"),
        ([due("a", world.now_s + 5 * 366 * 86400)], "is no time of the near future"),
    ]
    for tasks, says in cases:
        with pytest.raises(Refusal, match=says) as refused:
            feed(world, *tasks)
        assert refused.value.status == 422
    monkeypatch.setattr(timetable_intake, "MOST_RUNS", 3)
    with pytest.raises(Refusal, match="4 due runs in one request"):
        feed(world, due("a", 1.0, 2.0), due("b", 1.0, 2.0))
    with world.store.read() as reader:
        assert reader.recurring_tasks() == []

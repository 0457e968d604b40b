"""The operator in front of a scripted service: what it submits, how it waits, and how it ends."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pendulum
import pytest
from airflow.sdk.bases.operator import ExecutorSafeguard
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    TaskDeferralTimeout,
    TaskDeferred,
)
from airflow.sdk.execution_time.context import ConnectionAccessor
from support.elastic_tasks import Store, context_of, success

from elasticflow_airflow.api import Event, State, Verdict
from elasticflow_airflow.exceptions import JobRejected
from elasticflow_airflow.task import acknowledging
from elasticflow_airflow.waiting.leased_jobs import lease_renewer


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ExecutorSafeguard, "test_mode", True)
    monkeypatch.setenv("AIRFLOW__ELASTICFLOW__POLL_INTERVAL_S", "0.01")
    monkeypatch.setenv("AIRFLOW__ELASTICFLOW__INLINE_WAIT_S", "0")
    yield
    for job in lease_renewer().kept():
        lease_renewer().forget(job.job_id)
    lease_renewer()._interrupted.clear()


def test_submits_what_was_asked_and_returns_a_small_result(service, make_status, make_task):
    service.statuses = [success(make_status)]
    task = make_task(script_args=["--n", 3], env={"A": "1"}, scaling_curve={1: 2.0}, value=2)
    got = task.execute(context_of(task))
    body = service.did("submit")[0]
    assert body["command"]["args"] == ["--n", "3"]
    assert body["command"]["script"] == "train.py"
    assert body["command"]["env"] == {"A": "1"}
    assert body["length"] == {"steps": 10, "epochs": None, "samples": None}
    assert body["scaling_curve"] == {"1": 2.0}
    assert (body["lease_s"], body["orphan_s"]) == (600.0, 3600.0)
    assert abs(body["deadline_at"] - time.time() - 3600) < 60
    assert set(got) == {
        "job_id", "verdict", "deadline", "finished_at", "slack_s", "met", "steps", "final_loss", "checkpoint_path",
        "checkpoint_digest", "gpu_seconds", "rescales", "seed", "logical_workers", "metrics",
    }  # fmt: skip
    assert (got["steps"], got["final_loss"], got["met"], got["verdict"]) == (10, 0.25, True, "admitted")
    assert not service.did("acknowledge")


def test_requirements_are_a_list_or_a_file_beside_the_dag(service, make_status, make_task):
    service.statuses = [success(make_status), success(make_status)]
    task = make_task(requirements=["accelerate==1.1.0"])
    context = context_of(task)
    task.execute(context)
    Path(context["dag"].folder, "more.txt").write_text("numpy>=2  # arrays\n")
    task = make_task(requirements="more.txt")
    task.execute(context_of(task))
    submitted = [body["command"]["requirements"] for body in service.did("submit")]
    assert submitted == [["accelerate==1.1.0"], ["numpy>=2"]]
    task = make_task(requirements="none.txt")
    with pytest.raises(AirflowFailException, match=r"requirements='none.txt' is not there: looked for"):
        task.execute(context_of(task))


@pytest.mark.parametrize(("rendered", "submitted"), [("latest", "latest"), ("", None)])
def test_an_empty_text_in_place_of_a_checkpoint_trains_from_scratch(
    service, make_status, make_task, rendered, submitted
):
    service.statuses = [success(make_status)]
    task = make_task(init_from="{{ params.init_from }}")
    task.init_from = rendered  # as Airflow renders the fields of a task in its run
    task.execute(context_of(task))
    assert service.did("submit")[0]["init_from"] == submitted


def test_success_is_acknowledged_by_the_listener_only(service, make_status, make_task):
    service.statuses = [success(make_status)]
    task = make_task()
    task.execute(context_of(task))
    acknowledging.on_task_instance_success(previous_state=None, task_instance=SimpleNamespace(task=task))
    assert [body["claim"] for body in service.did("acknowledge")] == [1]
    acknowledging.on_task_instance_success(previous_state=None, task_instance=SimpleNamespace(task=None))
    acknowledging.on_task_instance_success(previous_state=None, task_instance=SimpleNamespace())
    assert len(service.did("acknowledge")) == 1


@pytest.mark.parametrize(("state", "cancels"), [("failed", 1), ("up_for_retry", 0)])
def test_a_task_that_failed_for_good_takes_its_job_with_it(service, make_status, make_task, state, cancels):
    service.statuses = [success(make_status)]
    task = make_task()
    task.execute(context_of(task))
    ti = SimpleNamespace(task=task, state=state)
    acknowledging.on_task_instance_failed(previous_state=None, task_instance=ti, error=None)
    assert len(service.did("cancel")) == cancels


def test_defers_with_all_that_the_trigger_needs(service, make_task):
    task = make_task(execution_timeout=timedelta(hours=2))
    store = Store()
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context_of(task, store))
    trigger = deferred.value.trigger
    assert (trigger.claim, trigger.min_deferral_s) == (1, 15.0)
    assert timedelta(minutes=119) < deferred.value.timeout <= timedelta(hours=2)
    assert store["elasticflow"]["claim"] == 1


def test_goes_on_from_the_event_alone(service, make_status, make_task):
    task = make_task()
    service.known = service.statuses[0] = success(make_status)
    service.claim = 4
    event = {"job_id": "j", "claim": 4, "outcome": "ended"}
    assert task.execute_complete(context_of(task), event)["steps"] == 10
    assert task.elasticflow_job.claim == 4
    with pytest.raises(AirflowFailException, match="a newer attempt"):
        task.execute_complete(context_of(task), {**event, "outcome": "stale"})
    with pytest.raises(AirflowException, match="did not answer for 1 h"):
        task.execute_complete(context_of(task), {**event, "outcome": "away"})


def test_a_deferral_that_timed_out_cancels_the_job(service, make_task):
    task = make_task(execution_timeout=timedelta(hours=2))
    context = context_of(task)
    with pytest.raises(TaskDeferred):
        task.execute(context)
    with pytest.raises(TaskDeferralTimeout):
        task.resume_execution("__fail__", {"error": "Trigger timeout"}, context)
    assert len(service.did("cancel")) == 1


def test_dag_test_pokes_with_one_claim_and_a_short_lease(service, make_status, make_task, capsys):
    service.events = [Event(event_id=3, job_id="j", at=1.0, kind="admitted", reason="fits")]
    service.statuses = [
        make_status(State.ADMITTED, last_event_id=3),
        make_status(step=2, last_event_id=3),
        success(make_status, last_event_id=3),
    ]
    task, store = make_task(), Store()
    for _ in range(2):
        with pytest.raises(AirflowRescheduleException):
            task.execute(context_of(task, store, dag_test=True))
    assert len(lease_renewer().kept()) == 1
    assert task.execute(context_of(task, store, dag_test=True))["steps"] == 10
    assert lease_renewer().kept() == []
    assert len(service.did("submit")) == 1
    assert (service.did("submit")[0]["lease_s"], service.did("submit")[0]["orphan_s"]) == (60.0, 300.0)
    assert capsys.readouterr().out.count("event 3 · admitted: fits") == 1


def test_a_retry_attaches_again_and_keeps_its_deadline(service, make_task):
    task, store = make_task(retries=1), Store()
    due = pendulum.now("UTC")
    for try_number in (1, 2):
        with pytest.raises(TaskDeferred):
            task.execute(context_of(task, store, try_number=try_number, run_after=due))
    first, second = service.did("submit")
    assert first["deadline_at"] == second["deadline_at"]
    assert store["elasticflow"]["claim"] == 2


def test_blocking_waits_and_renews(service, make_status, make_task):
    service.statuses = [make_status(), make_status(step=1), make_status(step=2), success(make_status)]
    task = make_task(deferrable=False)
    assert task.execute(context_of(task))["steps"] == 10
    assert len(service.did("lease")) == 3


def test_blocking_outlasts_a_service_that_is_away(service, make_status, make_task):
    service.statuses = [make_status(), success(make_status)]
    task = make_task(deferrable=False)

    def leave(verb):
        service.away, service.on_call = (2, None) if verb == "submit" else (0, leave)

    service.on_call = leave
    assert task.execute(context_of(task))["steps"] == 10


def test_rejection_fails_without_retry_and_says_what_would_do(service, make_status, make_task):
    now = time.time()
    verdict = Verdict(
        decision="rejected",
        reason="needs 4 slots of 2",
        deadline_at=now + 60,
        earliest_deadline_at=now + 660,
        event_id=9,
    )
    service.statuses = [make_status(State.REJECTED, verdict=verdict)]
    task = make_task()
    with pytest.raises(AirflowFailException, match="needs 4 slots of 2") as failed:
        task.execute(context_of(task))
    text = str(failed.value)
    assert "earliest feasible deadline" in text
    assert "(in 11 min" in text or "(in 10 min" in text
    assert "on_reject='best_effort'" in text
    assert "event 9" in text


def test_failure_shows_what_the_service_says(service, make_status, make_task):
    service.statuses = [make_status(State.FAILED, step=4, failure="rank 1 exited with 1:\nZeroDivisionError: x")]
    task = make_task()
    with pytest.raises(AirflowException, match="ZeroDivisionError") as failed:
        task.execute(context_of(task))
    assert not isinstance(failed.value, AirflowFailException)  # may be tried again, from the last checkpoint


def test_cancelled_from_outside_fails_for_good(service, make_status, make_task):
    service.statuses = [make_status(State.CANCELLED, state_reason="cancelled by ops")]
    task = make_task()
    with pytest.raises(AirflowFailException, match="cancelled by ops"):
        task.execute(context_of(task))


@pytest.mark.parametrize(
    ("run_type", "max_tries", "policy", "asked"),
    [
        ("backfill", 0, "auto", "best_effort"),
        ("scheduled", 1, "auto", "best_effort"),  # cleared: max_tries above the task's own retries
        ("scheduled", 0, "best_effort", "best_effort"),
        ("scheduled", 0, "auto", "on_miss"),
        ("scheduled", 0, "fail", "on_miss"),
        ("backfill", 0, "fail", "fail"),
        ("scheduled", 1, "fail", "fail"),
        ("manual", 0, "auto", "on_miss"),  # it began in time, and its task comes late
        ("manual", 0, "best_effort", "best_effort"),
    ],
)
def test_what_is_asked_for_a_deadline_that_has_passed(service, make_task, run_type, max_tries, policy, asked):
    task = make_task(on_past_deadline=policy)
    due = pendulum.now("UTC").subtract(days=3)
    with pytest.raises(TaskDeferred):
        task.execute(context_of(task, run_after=due, run_type=run_type, max_tries=max_tries))
    assert service.did("submit")[0].get("on_past_deadline", "on_miss") == asked
    assert service.did("submit")[0]["deadline_at"] == due.add(hours=1).timestamp()


@pytest.mark.parametrize(
    ("began_after_s", "policy", "changes", "asked"),
    [
        (3 * 86400, "auto", {}, "best_effort"),  # the DAG was unpaused long after the run was due, or catches up
        (3601, "auto", {}, "best_effort"),
        (3599, "auto", {}, "on_miss"),  # what came before it in the run took too long: somebody waits for it
        (3 * 86400, "fail", {}, "on_miss"),
        (3601, "auto", {"on_reject": "late", "latest_deadline": timedelta(hours=2)}, "on_miss"),  # not over yet then
        (7201, "auto", {"on_reject": "late", "latest_deadline": timedelta(hours=2)}, "best_effort"),
        (3 * 86400, "auto", {"deadline": pendulum.datetime(2026, 1, 1)}, "on_miss"),  # past before the run was due
    ],
)
def test_a_run_that_began_after_its_deadline_trains_as_best_effort(
    service, make_task, capsys, began_after_s, policy, changes, asked
):
    due = pendulum.now("UTC").subtract(days=3)
    task = make_task(on_past_deadline=policy, **changes)
    with pytest.raises(TaskDeferred):
        task.execute(context_of(task, run_after=due, began=due.add(seconds=began_after_s)))
    assert service.did("submit")[0].get("on_past_deadline", "on_miss") == asked
    assert ("on_past_deadline='fail' refuses such a run" in capsys.readouterr().out) == (asked == "best_effort")


def test_a_late_job_that_trains_as_best_effort_says_so(service, make_status, make_task, capsys):
    service.statuses = [make_status(best_effort=True, deadline_at=None)]
    task = make_task(on_past_deadline="best_effort")
    with pytest.raises(TaskDeferred):
        task.execute(context_of(task, run_after=pendulum.now("UTC").subtract(days=3)))
    assert "the deadline passed 2 d 23 h ago: training as best effort" in capsys.readouterr().out


def test_a_late_job_that_is_rejected_says_what_can_be_done(service, make_status, make_task):
    now = pendulum.now("UTC").timestamp()
    verdict = Verdict(decision="rejected", reason="it is past", deadline_at=now - 60, earliest_deadline_at=now + 60)
    service.statuses = [make_status(state=State.REJECTED, submitted_at=now, verdict=verdict)]
    with pytest.raises(JobRejected, match=r"(?s)earliest feasible deadline: .*on_past_deadline='best_effort'"):
        make_task().execute(context_of(make_task(), run_after=pendulum.now("UTC").subtract(days=3)))


def test_a_late_retry_still_attaches_to_its_live_job(service, make_status, make_task):
    service.known = make_status()
    task = make_task(retries=1)
    due = pendulum.now("UTC").subtract(hours=2)
    with pytest.raises(TaskDeferred):
        task.execute(context_of(task, run_after=due, try_number=2, max_tries=1))
    assert service.did("submit")[0]["best_effort"] is False
    assert not service.did("cancel")


def test_mistakes_known_only_at_run_time_are_said_before_any_submit(service, make_task):
    cases = [
        ({"steps": "{{ ti.xcom_pull('extract') }}"}, {"steps": "None"}, "steps rendered to 'None'.*'extract'"),
        ({"steps": "{{ x }}"}, {"steps": "12.5"}, "steps='12.5'"),
        ({"env": {"A": "{{ ti.xcom_pull('e') }}"}}, {"env": {"A": "None"}}, r"env\['A'\] rendered to 'None'"),
        ({"deadline": "{{ x }}"}, {"deadline": "later"}, "deadline='later'"),
        ({}, {"script": "gone.py"}, "script='gone.py' is not there: looked for"),
        ({"deadline_of": "publish"}, {}, "deadline_of='publish' is no task downstream"),
        ({"env": {"A": "{{ x }}"}}, {"env": {"A": ["x"]}}, r"env\['A'\]=\['x'\] is a list"),
        ({"script_args": ["{{ x }}"]}, {"script_args": [{"x": 1}]}, r"script_args\[0\]={'x': 1} is a dict"),
        (
            {"deadline": "02:30", "on_reject": "late", "latest_deadline": "02:00"},
            {},
            r"latest_deadline='02:00' is .* 02:00 UTC, and that is not later than the deadline .* 02:30 UTC",
        ),
    ]
    for arguments, rendered, words in cases:
        task = make_task(**arguments)
        for name, value in rendered.items():
            setattr(task, name, value)
        with pytest.raises(AirflowFailException, match=words):
            task.execute(context_of(task, run_after=pendulum.now("UTC").start_of("day")))
    assert service.calls == []


def test_secrets_come_from_connections_and_are_not_shown(service, make_status, make_task, monkeypatch, capsys):
    monkeypatch.setenv(
        "AIRFLOW_CONN_HUB", '{"conn_type": "http", "password": "hunter22", "extra": {"api.key": "k3yk3yk3y"}}'
    )
    service.statuses = [success(make_status)]
    secret_env = {"TOKEN": "conn:hub.password", "KEY": "conn:hub.extra.api.key"}
    task = make_task(secret_env=secret_env)
    task.execute(context_of(task))
    assert service.did("submit")[0]["secret_env"] == {"TOKEN": "hunter22", "KEY": "k3yk3yk3y"}
    said = capsys.readouterr().out
    assert "submitted job" in said
    assert "hunter22" not in said
    for reference, words in (
        ("conn:nope.password", r"'nope' is not defined: define it .*AIRFLOW_CONN_NOPE\), or name another"),
        ("conn:hub.login", "no such value: give it a login, or name the field"),
        ("conn:hub.extra.nope", "no such value: give it a 'nope' in its extra, or name the field"),
    ):
        task = make_task(secret_env={"A": reference})
        with pytest.raises(AirflowFailException, match=words):
            task.execute(context_of(task))


def test_secrets_in_arguments_are_marked_for_whoever_shows_them(service, make_status, make_task, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_HUB", '{"conn_type": "http", "password": "hunter22"}')
    hub = "https://me:{{ conn.hub.password }}@hub"
    service.statuses = [success(make_status)]
    task = make_task(script_args=["--token", "{{ conn.hub.password }}", f"--hub={hub}", "--lr", 0.1])
    task.render_template_fields({"conn": ConnectionAccessor()})
    task.execute(context_of(task))
    command = service.did("submit")[0]["command"]
    assert command["args"] == ["--token", "hunter22", "--hub=https://me:hunter22@hub", "--lr", "0.1"]
    assert command["args_shown"] == ["--token", "***", "--hub=https://me:***@hub", "--lr", "0.1"]


def test_what_a_connection_gives_as_a_secret_is_marked_in_arguments_too(service, make_status, make_task, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_VAULT", '{"conn_type": "http", "password": "0pen-sesame"}')
    service.statuses = [success(make_status)]
    task = make_task(script_args=["0pen-sesame"], secret_env={"TOKEN": "conn:vault.password"})
    task.execute(context_of(task))
    assert service.did("submit")[0]["command"]["args_shown"] == ["***"]


def test_arguments_without_a_secret_are_sent_once(service, make_status, make_task):
    service.statuses = [success(make_status)]
    task = make_task(script_args=["--lr", "0.1"])
    task.execute(context_of(task))
    assert "args_shown" not in service.did("submit")[0]["command"]  # which an earlier service would refuse


def test_ctrl_c_inside_a_task_ends_the_whole_run_and_no_other(service, make_task):
    """Airflow takes Ctrl-C for that one task's failure, and would go on with the others."""

    def press(verb):
        if verb == "lease":
            raise KeyboardInterrupt

    task, store = make_task(), Store()
    with pytest.raises(AirflowRescheduleException):
        task.execute(context_of(task, store, dag_test=True))
    service.on_call = press
    with pytest.raises(KeyboardInterrupt):
        task.execute(context_of(task, store, dag_test=True))
    assert len(service.did("cancel")) == 1
    service.on_call = None
    with pytest.raises(AirflowFailException, match="interrupted by Ctrl-C"):
        task.execute(context_of(task, Store(), dag_test=True))
    later = context_of(task, Store(), dag_test=True)
    later["ti"].run_id = "run2"
    with pytest.raises(AirflowRescheduleException):
        task.execute(later)

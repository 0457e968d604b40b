"""Who hears of a training, and what they are told: on_at_risk, notifiers, on_promote, assets, retry policies, links."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
from airflow.sdk import Asset, BaseNotifier, RetryAction
from airflow.sdk.bases.operator import ExecutorSafeguard
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from support.elastic_tasks import Store, context_of, success

from elasticflow_airflow.api import Event, State
from elasticflow_airflow.exceptions import JobCancelled, JobFailed, JobRejected, ServiceAway
from elasticflow_airflow.links import ElasticFlowJobLink
from elasticflow_airflow.notifications import ElasticFlowNotifier
from elasticflow_airflow.operators import ElasticTrainOperator
from elasticflow_airflow.retry_policies import ElasticFlowRetryPolicy
from elasticflow_airflow.waiting.leased_jobs import lease_renewer


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ExecutorSafeguard, "test_mode", True)
    monkeypatch.setenv("AIRFLOW__ELASTICFLOW__POLL_INTERVAL_S", "0.01")
    monkeypatch.setenv("AIRFLOW__ELASTICFLOW__INLINE_WAIT_S", "0")
    yield
    for job in lease_renewer().kept():
        lease_renewer().forget(job.job_id)


@pytest.fixture
def make_task(make_task):
    """Tasks that wait in the worker."""
    return partial(make_task, deferrable=False)


HEARD: list[dict] = []


def hear(context):
    """What an import path leads to."""
    HEARD.append(dict(context["elasticflow"]))


@pytest.fixture
def heard():
    HEARD.clear()
    yield HEARD
    HEARD.clear()


# --- on_at_risk ------------------------------------------------------------------------------------------------------


def test_each_time_a_job_comes_to_be_at_risk_is_told_once(service, make_status, make_task, heard):
    service.events = [Event(event_id=7, job_id="j", at=1.0, kind="at_risk", reason="one node is slow")]
    at_risk = make_status(at_risk=True, step=4, workers=2, slack_s=-300.0)
    service.statuses = [
        make_status(), at_risk, at_risk, make_status(), at_risk, at_risk, success(make_status),
    ]  # fmt: skip
    task = make_task(on_at_risk=hear)
    assert task.execute(context_of(task))["steps"] == 10
    assert [(one["at_risk"], one["step"], one["reason"]) for one in heard] == [(True, 4, "one node is slow")] * 2
    assert "Training daily.train (run run1) may miss its deadline" in heard[0]["message"]
    assert "by 5 min" in heard[0]["message"]
    assert "one node is slow" in heard[0]["message"]


def test_nobody_is_told_of_a_risk_when_it_is_over(service, make_status, make_task, heard):
    """A job that has ended may still be said to be at risk; Airflow's own alerts fire after the run has failed."""
    service.statuses = [make_status(), success(make_status).model_copy(update={"at_risk": True, "slack_s": -300.0})]
    task = make_task(on_at_risk=hear)
    assert task.execute(context_of(task))["steps"] == 10
    assert heard == []


def test_a_callback_that_breaks_ends_no_training_and_no_other_callback(service, make_status, make_task, heard, capsys):
    service.statuses = [make_status(), make_status(at_risk=True), success(make_status)]

    def broken(context):
        raise RuntimeError("the chat is down")

    task = make_task(on_at_risk=[broken, f"{__name__}.hear", "nowhere.at.all"])
    assert task.execute(context_of(task))["steps"] == 10
    assert len(heard) == 1
    said = capsys.readouterr().out
    assert "the chat is down" in said
    assert "nowhere" in said


async def test_a_deferred_task_is_resumed_for_it_and_waits_on(service, make_status, make_task, heard):
    service.statuses = [make_status(), make_status(at_risk=True)]
    task, store = make_task(on_at_risk=hear, deferrable=True, execution_timeout=timedelta(hours=1)), Store()
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context_of(task, store))
    trigger = deferred.value.trigger
    assert (trigger.alarm, trigger.told) == (True, bool(heard))
    service.statuses = [make_status(at_risk=True, last_event_id=4)]
    service.events = [Event(event_id=4, job_id="j", at=1.0, kind="at_risk", reason="slow")]
    heard.clear()
    trigger.min_deferral_s = trigger.poll_interval_s = 0.0
    trigger.told = False
    fired = await anext(trigger.run())
    assert (fired.payload["outcome"], fired.payload["event_id"]) == ("at_risk", 4)
    store["elasticflow"]["told_at_risk"] = False
    with pytest.raises(TaskDeferred) as deferred:
        task.execute_complete(context_of(task, store), fired.payload)
    assert [one["reason"] for one in heard] == ["slow"]
    again = deferred.value.trigger
    assert (again.alarm, again.told, again.last_event_id) == (True, True, 4)
    assert deferred.value.timeout <= timedelta(hours=1)
    # While it stays at risk nobody is told again; once it does not, the next time counts.
    again.min_deferral_s = again.poll_interval_s = 0.0
    at_risk = make_status(at_risk=True, last_event_id=4)
    service.statuses = [at_risk, at_risk, make_status(last_event_id=4), at_risk]
    assert (await anext(again.run())).payload["outcome"] == "at_risk"


def test_a_trigger_without_callbacks_does_not_fire_for_it(service, make_status, make_task):
    task = make_task(deferrable=True)
    with pytest.raises(TaskDeferred) as deferred:
        task.execute(context_of(task))
    assert deferred.value.trigger.serialize()[1]["alarm"] is False


# --- notifiers -------------------------------------------------------------------------------------------------------


class Chat(BaseNotifier):
    """A notifier as other providers have them."""

    template_fields = ("text",)
    said: list[str] = []  # noqa: RUF012 - what the test looks at

    def __init__(self, text):
        super().__init__()
        self.text = text

    def notify(self, context):
        self.said.append(self.text)


def test_any_notifier_can_render_what_is_known(service, make_status, make_task):
    first, second = make_status(at_risk=True, step=4), make_status(at_risk=True, step=7)
    service.statuses = [make_status(), first, make_status(), second, success(make_status)]
    Chat.said.clear()
    task = make_task(on_at_risk=Chat("step {{ elasticflow.step }} of {{ ti.task_id }}"))
    task.execute(context_of(task))
    assert Chat.said == ["step 4 of train", "step 7 of train"]


@pytest.fixture
def webhook(monkeypatch):
    """A server that takes what is posted."""
    posted: list[tuple[str, dict]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted.append((self.path, json.loads(body)))
            self.send_response(404 if "gone" in self.path else 200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = {"conn_type": "http", "host": "http://127.0.0.1", "port": server.server_port}
    monkeypatch.setenv("AIRFLOW_CONN_CHAT", json.dumps({**url, "password": "/services/T0/B0"}))
    monkeypatch.setenv("AIRFLOW_CONN_GONE", json.dumps({**url, "extra": {"webhook_path": "gone"}}))
    yield posted
    server.shutdown()
    thread.join()
    server.server_close()


def test_our_notifier_posts_to_a_webhook(service, make_status, make_task, webhook, monkeypatch):
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example.com/prefix")
    service.statuses = [make_status(State.FAILED, step=4, failure="ZeroDivisionError: x")]
    task = make_task()
    context = context_of(task)
    with pytest.raises(JobFailed):
        task.execute(context)
    ElasticFlowNotifier(webhook_conn_id="chat")(context)  # as Airflow calls on_failure_callback
    ((path, body),) = webhook
    assert path == "/services/T0/B0"
    assert "Training daily.train (run run1) failed" in body["text"]
    assert "ZeroDivisionError: x" in body["text"]
    assert "https://airflow.example.com/prefix/plugin/elasticflow/prefix/elasticflow/?dag_id=daily" in body["text"]
    ElasticFlowNotifier(message="{{ elasticflow.state }}!", webhook_conn_id="chat")(context)
    assert webhook[-1][1] == {"text": "failed!"}
    with pytest.raises(Exception, match="404"):
        ElasticFlowNotifier(webhook_conn_id="gone")(context)


def test_our_notifier_says_what_is_wrong_where_there_is_no_job(make_task, capsys):
    task = make_task()
    context = context_of(task, exception=AirflowException("script='gone.py' is not there"))
    ElasticFlowNotifier()(context)
    assert "Training daily.train (run run1) failed: script='gone.py' is not there" in capsys.readouterr().out


# --- on_promote and assets -------------------------------------------------------------------------------------------


def register(result, checkpoint_path, run_id):
    """A hook that names what it wants."""
    HEARD.append({"result": dict(result), "checkpoint_path": checkpoint_path, "run_id": run_id})
    return {"model": "bert", "version": 3}


@pytest.mark.parametrize("hook", [register, f"{__name__}.register"])
def test_a_success_is_promoted_with_what_the_hook_asks_for(service, make_status, make_task, heard, hook):
    service.statuses = [success(make_status)]
    task = make_task(on_promote=hook)
    result = task.execute(context_of(task))
    (told,) = HEARD
    assert (told["checkpoint_path"], told["run_id"], told["result"]["final_loss"]) == ("/c", "run1", 0.25)
    assert result["promoted"] == {"model": "bert", "version": 3}
    json.dumps(result)


def test_a_promotion_that_fails_is_tried_again_without_training(service, make_status, make_task):
    service.statuses = [success(make_status)]
    failures = [RuntimeError("the registry is down")]

    def promote(**everything):
        if failures:
            raise failures.pop()
        return sorted(everything.keys() & {"result", "ti", "checkpoint_path"})

    task, store = make_task(on_promote=promote, retries=1), Store()
    with pytest.raises(RuntimeError, match="the registry is down"):
        task.execute(context_of(task, store))
    assert not service.did("acknowledge")
    assert task.elasticflow_job is not None
    result = task.execute(context_of(task, store, try_number=2))
    assert result["promoted"] == ["checkpoint_path", "result", "ti"]


def test_a_failure_is_not_promoted(service, make_status, make_task, heard):
    service.statuses = [make_status(State.FAILED, failure="x")]
    task = make_task(on_promote=register)
    with pytest.raises(JobFailed):
        task.execute(context_of(task))
    assert heard == []


def test_assets_carry_the_checkpoint(service, make_status, make_task):
    service.statuses = [success(make_status)]
    model = Asset("bert")
    events = {model: SimpleNamespace(extra={})}
    task = make_task(outlets=[model])
    task.execute(context_of(task, outlet_events=events))
    extra = events[model].extra
    assert (extra["checkpoint_path"], extra["checkpoint_digest"], extra["steps"], extra["met"]) == (
        "/c",
        "d1",
        10,
        True,
    )
    json.dumps(extra)


# --- retry policy and errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "action", "delay_s"),
    [
        (ServiceAway("away"), RetryAction.RETRY, 30),
        (JobFailed("x", step=3), RetryAction.RETRY, None),
        (ValueError("what"), RetryAction.DEFAULT, None),
    ],
)
def test_retry_policy(error, action, delay_s):
    decision = ElasticFlowRetryPolicy().evaluate(error, 1, 3, {"task_state_store": Store()})
    assert decision.action is action
    assert decision.retry_delay == (None if delay_s is None else timedelta(seconds=delay_s))


def test_the_same_failure_at_the_same_step_is_no_accident():
    policy, context = ElasticFlowRetryPolicy(failed_delay=timedelta(seconds=5)), {"task_state_store": Store()}
    said = []
    for step, line in ((3, "ValueError: x"), (5, "ValueError: x"), (5, "ValueError: y"), (5, "ValueError: y")):
        decision = policy.evaluate(JobFailed(f"job failed\n{line}", step=step), 1, 9, context)
        said.append(decision.action)
    assert said == [RetryAction.RETRY] * 3 + [RetryAction.FAIL]
    assert policy.evaluate(JobFailed("x", step=1), 1, 9).action is RetryAction.RETRY
    copy = ElasticFlowRetryPolicy.deserialize(json.loads(json.dumps(policy.serialize())))
    assert vars(copy) == vars(policy)
    with pytest.raises(ValueError, match="service_away_delay=30 must be a timedelta"):
        ElasticFlowRetryPolicy(service_away_delay=30)


@pytest.mark.parametrize(
    ("state", "kind"),
    [(State.REJECTED, JobRejected), (State.CANCELLED, JobCancelled), (State.FAILED, JobFailed)],
)
def test_ends_have_types(service, make_status, make_task, state, kind):
    service.statuses = [make_status(state, step=6)]
    task = make_task()
    context = context_of(task)
    with pytest.raises(kind) as failed:
        task.execute(context)
    assert isinstance(failed.value, AirflowFailException) == (kind is not JobFailed)
    assert context["elasticflow"]["state"] == state.value
    if kind is JobFailed:
        assert failed.value.step == 6


# --- the link --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("", "/plugin/elasticflow/elasticflow/?dag_id=d&run_id=manual__2026%2B1&task_id=g.train&map_index=2"),
        ("https://host/air/", "https://host/air/plugin/elasticflow/air/elasticflow/?dag_id=d"),
    ],
)
def test_link(make_task, monkeypatch, base_url, url):
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", base_url)
    key = SimpleNamespace(dag_id="d", run_id="manual__2026+1", task_id="g.train", map_index=2)
    (link,) = ElasticTrainOperator.operator_extra_links
    assert isinstance(link, ElasticFlowJobLink)
    assert link.get_link(make_task(), ti_key=key).startswith(url)
    assert link.name == "ElasticFlow job"

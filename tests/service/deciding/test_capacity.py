"""What nobody needs and what is missing, as the service tells it: over HTTP, as gauges, and on the command line."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.service_parts import parts_of
from typer.testing import CliRunner

from elasticflow_airflow.api.insight import CapacityAnswer
from elasticflow_airflow.cli import capacity as command
from elasticflow_airflow.cli.main import app as commands
from elasticflow_airflow.service.http.app import build_app
from elasticflow_airflow.service.refusal import Refusal
from elasticflow_airflow.service.requests.capacity_service import CapacityService, CapacityWatch
from elasticflow_airflow.service.requests.forecasting import ForecastService
from elasticflow_airflow.service.store.documents.columns import Unreadable

HOUR_S = 3600.0
CURVE = {1: 10.0, 2: 18.0, 4: 32.0}


@pytest.fixture
def world(make_world):
    return make_world(nodes=3, slots=4)


def service_of(world) -> CapacityService:
    reconciler = world.reconciler
    return CapacityService(
        ForecastService(
            world.store, world.settings, reconciler.copy_scheduler, lambda: reconciler.device_type, clock=world.clock
        )
    )


def tight(world, task: str, **given):
    """A job that needs four workers from now on: some 63 s of the 110 until its deadline, with its start."""
    values = {"steps": 2000, "within": 110.0, "scaling_curve": CURVE, "max_workers": 4, **given}
    return world.submit(task=task, **values)


def test_before_the_first_pass_nobody_can_say(make_world):
    with pytest.raises(Refusal) as refused:
        service_of(make_world()).capacity()
    assert refused.value.status == 503


@pytest.mark.parametrize(
    "wrong", [{"submission": True}, {"submission": {"scaling_curve": 3}}, {"costs": {"tail_s": "x"}}]
)
def test_a_rejected_job_that_cannot_be_read_hides_nobody(world, wrong):
    for task in ("a", "b", "c", "d", "e"):
        last = tight(world, task)
    world.run(1)
    assert world.status(last).state == "rejected"
    wants = {want.task for want in service_of(world).capacity().wanted_by}
    assert "daily.e" in wants
    with world.store.write() as tx:
        for name, value in wrong.items():
            stored = Unreadable(value, "nobody can read it") if name == "submission" else value
            setattr(tx.current(last.job.job_id)[1], name, stored)
    assert {want.task for want in service_of(world).capacity().wanted_by} == wants - {"daily.e"}


def test_nobody_needs_an_idle_cluster(world):
    world.step()
    answer = service_of(world).capacity(2.0)
    assert [(node.node_id, node.slots, node.idle) for node in answer.releasable] == [
        ("node0", 4, True),
        ("node1", 4, True),
        ("node2", 4, True),
    ]
    assert (answer.releasable_slots, answer.wanted_nodes, answer.wanted_slots) == (12, 0, 0)
    assert answer.until_at == answer.asked_at + 2 * HOUR_S
    assert answer.summary.startswith("3 of 3 nodes (12 slots) not needed until ")


def test_what_a_job_and_an_expected_run_need_stays(world):
    job = tight(world, "nightly", next_run_at=world.now_s + HOUR_S)
    assert job.job.verdict.decision == "admitted"
    assert len(service_of(world).capacity().releasable) == 2
    assert world.ended(job).state == "succeeded"
    assert len(service_of(world).capacity().releasable) == 2
    assert len(service_of(world).capacity(0.1).releasable) == 3


def test_a_node_that_is_drained_is_no_longer_told_and_can_go(world):
    job = tight(world, "one", within=600.0)
    world.until(lambda: world.status(job).step > 5, "it trains")
    for node in service_of(world).capacity().releasable:
        world.job_service.drain(node.node_id, world.now_s + 20.0)
    world.run(25.0)
    assert service_of(world).capacity().releasable == []
    assert world.status(job).state == "running"
    assert len({node for node, _ in world.status(job).slots}) == 1
    assert world.ended(job).result.met


def test_rejected_jobs_ask_for_nodes_until_their_deadline_or_until_they_come_again(world):
    first = [tight(world, f"t{number}") for number in range(4)]
    assert [job.job.verdict.decision for job in first] == ["admitted"] * 3 + ["rejected"]
    hopeless = tight(world, "hopeless", steps=200_000)
    answer = service_of(world).capacity()
    assert answer.releasable == []
    assert (answer.wanted_nodes, answer.slots_per_node, answer.wanted_slots) == (1, 4, 4)
    (want,) = answer.wanted_by
    assert (want.need, want.task, want.job_id, want.dag_id) == ("rejected", "daily.t3", first[3].job.job_id, "daily")
    assert want.deadline_at == first[3].job.deadline_at
    assert [one.job_id for one in answer.hopeless] == [hopeless.job.job_id]
    assert "would be enough for 1 rejected job; no further node would help 1 rejected job" in answer.summary
    again = world.submit(task="t3", steps=2000, within=4000.0, scaling_curve=CURVE)
    assert again.job.incarnation == 2
    assert service_of(world).capacity().wanted_nodes == 0
    world.run(150.0)
    assert service_of(world).capacity().hopeless == []


def test_best_effort_without_slots_and_missed_runs_are_named(make_world):
    world = make_world()
    due = world.now_s + HOUR_S
    for task in ("one", "two"):
        job = tight(world, task, next_run_at=due)
        if job.job.verdict.decision == "admitted":
            world.job_service.cancel(job.job.job_id, job.claim, "seen enough")
            world.ended(job)
    world.submit(task="big", best_effort=True, scaling_curve=CURVE, min_workers=4, steps=10**6)
    world.submit(task="free", best_effort=True, scaling_curve=CURVE, min_workers=4, steps=10**6)
    answer = service_of(world).capacity()
    assert [(want.need, want.task) for want in answer.wanted_by] == [
        ("missed", "daily.two"),
        ("best_effort", "daily.free"),
    ]
    assert answer.wanted_by[0].job_id is None
    assert answer.wanted_by[1].deadline_at is None
    assert answer.wanted_nodes == 1


# -- over HTTP ---------------------------------------------------------------------------------------------------


def app_of(world, service, token=None):
    return build_app(parts_of(world, capacity=service), token)


async def test_the_route_answers_and_asks_for_the_token(world):
    world.step()
    transport = httpx.ASGITransport(app_of(world, service_of(world), "secret"), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        assert (await http.get("/v1/capacity")).status_code == 401
        http.headers["Authorization"] = "Bearer secret"
        answer = CapacityAnswer.model_validate_json((await http.get("/v1/capacity?hours=3")).content)
        assert answer.releasable_slots == 12
        assert answer.until_at == answer.asked_at + 3 * HOUR_S
        for hours in ("0", "-1", "1e9", "nan", "soon"):
            assert (await http.get("/v1/capacity", params={"hours": hours})).status_code == 422
    transport = httpx.ASGITransport(app_of(world, None), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        assert (await http.get("/v1/capacity")).status_code == 501


def test_the_client_asks_a_real_service(daemons, open_client):
    client = open_client(daemons.embedded())
    limit = time.monotonic() + 30.0
    while not client.health().slots:
        assert time.monotonic() < limit, "the service has not looked at its nodes"
    answer = client.capacity(2.0)
    assert answer.releasable_slots == len(client.health().slots)
    assert answer.wanted_by == []


# -- the gauges --------------------------------------------------------------------------------------------------


async def test_the_gauges_show_what_can_go_and_what_is_wanted(world):
    async def gauges(service: CapacityService | None) -> dict[str, float]:
        app, found = app_of(world, service), dict[str, float]()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
            for _ in range(1 if service is None else 20):  # each waits a little for what is not known yet
                text = (await client.get("/metrics")).text
                samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
                found = {s.name: s.value for s in samples if s.name.endswith(("releasable_slots", "wanted_slots"))}
                if found:
                    break
        return found

    world.step()
    service = service_of(world)
    assert await gauges(service) == {"elasticflow_releasable_slots": 12, "elasticflow_wanted_slots": 0}
    for number in range(4):
        tight(world, f"t{number}")
    assert await gauges(service) == {"elasticflow_releasable_slots": 0, "elasticflow_wanted_slots": 4}
    assert await gauges(None) == {}


class FakeService:
    """Counts how often it is asked; answers when it may."""

    def __init__(self) -> None:
        self.asked = 0
        self.begun, self.may = threading.Event(), threading.Event()
        self.problem: Exception | None = None

    def capacity(self, _hours: float) -> CapacityAnswer:
        self.asked += 1
        self.begun.set()
        assert self.may.wait(30.0)
        if self.problem is not None:
            raise self.problem
        return CapacityAnswer(asked_at=float(self.asked), until_at=1.0, summary="")


class Watching:
    def __init__(self) -> None:
        self.service, self.now_s = FakeService(), 0.0
        self.watch = CapacityWatch(self.service, monotonic=lambda: self.now_s)

    def look(self, wait_s: float = 30.0) -> float | None:
        found = self.watch.look(wait_s)
        return None if found is None else found.asked_at

    def settle(self) -> None:
        thread = self.watch._thread
        if thread is not None:
            thread.join(30.0)


def test_many_scrapes_ask_once_a_minute_and_never_wait_for_what_is_known():
    it = Watching()
    assert it.look(0.0) is None
    assert it.look(0.0) is None
    it.service.may.set()
    assert [it.look(), it.look()] == [1.0, 1.0]
    it.now_s = 59.0
    assert it.look() == 1.0
    it.service.may.clear()
    it.now_s = 60.0
    assert it.look() == 1.0, "the last answer, while the next is worked out"
    it.service.may.set()
    it.settle()
    assert it.look() == 2.0
    assert it.service.asked == 2


def test_planning_that_takes_long_is_done_seldom():
    it = Watching()
    it.look(0.0)
    assert it.service.begun.wait(30.0)
    it.now_s = 30.0
    it.service.may.set()
    it.settle()
    it.now_s = 30.0 + 599.0
    assert (it.look(), it.service.asked) == (1.0, 1)
    it.now_s = 30.0 + 600.0
    it.look()
    it.settle()
    assert it.service.asked == 2


def test_what_nobody_asked_for_in_a_while_is_not_shown():
    it = Watching()
    it.service.may.set()
    assert it.look() == 1.0
    it.now_s = 60.0 + 601.0
    assert it.look() == 2.0


def test_what_cannot_be_told_is_not_shown_and_is_asked_again():
    it = Watching()
    it.service.may.set()
    it.service.problem = Refusal(503, "busy", "busy", "")
    assert it.look() is None
    it.service.problem = None
    assert it.look() == 2.0
    it.now_s, it.service.problem = 60.0, RuntimeError("a defect")
    it.look()
    it.settle()
    assert it.look() is None
    assert it.service.asked == 3
    it.now_s, it.service.problem = 120.0, None
    assert it.look() == 4.0


# -- on the command line -----------------------------------------------------------------------------------------


@pytest.fixture
def ask(world, monkeypatch):
    """Run the command against the world's own service; the HTTP between the two is tested elsewhere."""

    @contextmanager
    def opened(_url, _state_dir):
        yield service_of(world)

    monkeypatch.setattr(command, "client", opened)
    monkeypatch.setenv("COLUMNS", "300")
    return lambda *options: CliRunner().invoke(commands, ["capacity", *options])


def test_the_command_lists_nodes_that_can_go(world, ask):
    tight(world, "one")
    done = ask()
    assert done.exit_code == 0, done.output
    assert done.output.count("idle") == 2
    assert "2 of 3 nodes (8 slots) not needed until" in done.output


def test_the_command_says_who_wants_more(world, ask):
    for number in range(4):
        tight(world, f"t{number}")
    tight(world, "hopeless", steps=200_000)
    done = ask("--hours", "1")
    assert "daily.t3" in done.output
    assert "hopeless, rejected" in done.output
    assert "1 more node of 4 slots would be enough for 1 rejected job" in done.output


def test_for_programs_the_command_prints_json(world, ask):
    world.step()
    answer = json.loads(ask("--json").output)
    assert answer["releasable_slots"] == 12
    assert CapacityAnswer.model_validate(answer).wanted_slots == 0
    assert ask("--hours", "0").exit_code == 2

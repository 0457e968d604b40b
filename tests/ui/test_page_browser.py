"""The page in a real Chromium, in a running Airflow under a base URL prefix, over a real service on the fake engine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.page_browser import IN_A_BROWSER, LIMIT_MS, check_accessibility, shown, wait
from support.quiet_network import quiet_network

from elasticflow_airflow.api import Command, JobIdentity, JobStatus, JobSubmission, Length, State
from elasticflow_airflow.client import ElasticFlowClient, Endpoint
from elasticflow_airflow.client.snapshot import snapshot_script

pytestmark = IN_A_BROWSER
TOKEN = "the token of this test's service"
CURVE = {1: 10.0, 2: 18.0, 4: 32.0}

ADD_DAGS = """
from airflow.models.dag import DagModel
from airflow.models.dagbundle import DagBundleModel
from airflow.utils.session import create_session
with create_session() as session:
    session.merge(DagBundleModel(name="page"))
    session.flush()
    for dag_id in ("fraud",):
        session.merge(DagModel(dag_id=dag_id, bundle_name="page", is_stale=False))
"""
WHOLE_DAGS = """
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG
for dag_id in ("nightly", "ranker"):
    with DAG(dag_id, schedule=None):
        EmptyOperator(task_id="train") >> EmptyOperator(task_id="report")
"""
"""DAGs that Airflow knows all of, so that it shows pages about their runs and tasks."""


RANKERS_TASK = "ranker/dagRuns/manual__1/taskInstances/train"


@dataclass
class Site:
    """Airflow's address, its users' sessions, and the service behind the page."""

    url: str
    service: ElasticFlowClient
    jobs: dict[str, JobStatus] = field(default_factory=dict)

    def session(self, user: str) -> str:
        answer = httpx.post(
            f"{self.url}auth/token", json={"username": user, "password": user}, timeout=60, trust_env=False
        )
        answer.raise_for_status()
        return str(answer.json()["access_token"])

    def ask_airflow(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = httpx.request(
            method,
            f"{self.url}api/v2/dags/{path}",
            json=body,
            headers={"Authorization": f"Bearer {self.session('admin')}"},
            timeout=60,
            trust_env=False,
        )
        answer.raise_for_status()
        return answer.json()

    def add_run(self, dag_id: str, run_id: str) -> None:
        """A run of a DAG as Airflow knows it; nobody executes its tasks."""
        self.ask_airflow("POST", f"{dag_id}/dagRuns", {"dag_run_id": run_id, "logical_date": None})

    def submit(self, dag_id: str, steps: int, **given: Any) -> JobStatus:
        """A job as an operator would submit it; the lease outlasts the tests."""
        snapshot = snapshot_script(Path(__file__))
        self.service.upload_snapshot(snapshot)
        submission = JobSubmission(
            identity=JobIdentity(dag_id=dag_id, run_id="manual__1", task_id="train"),
            command=Command(
                snapshot=snapshot.sha256,
                script=Path(__file__).name,
                env={"ELASTICFLOW_FAKE": json.dumps({"steps_per_s": CURVE})},
            ),
            length=Length(steps=steps),
            global_batch_size=32,
            scaling_curve=CURVE,
            max_workers=given.pop("max_workers", 2),
            lease_s=3600,
            labels={
                "deadline_arithmetic": "Deadline:\n  task 'publish' must end by  Sat 2026-11-21 07:30 UTC",
                "try": "1",
            },
            **given,
        )
        self.jobs[dag_id] = self.service.submit(submission).job
        return self.jobs[dag_id]

    def status(self, dag_id: str) -> JobStatus:
        return self.service.status(self.jobs[dag_id].job_id)

    def job(self, dag_id: str) -> str:
        return f"elasticflow/#/job/{dag_id}/{self.jobs[dag_id].job_id}"


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=20, trust_env=False).status_code < 500
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    home = Path(tempfile.mkdtemp(prefix="ef-page-"))
    (home / "dags").mkdir()
    (home / "passwords.json").write_text(json.dumps({"admin": "admin", "viewer": "viewer"}))
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    port, service_port = (probe.getsockname()[1] for probe in probes)
    for probe in probes:
        probe.close()
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("AIRFLOW", "ELASTICFLOW"))}
    connection = {"conn_type": "elasticflow", "host": "127.0.0.1", "port": service_port, "password": TOKEN}
    airflow = {
        **clean,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__API__BASE_URL": f"http://127.0.0.1:{port}/airflow",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API__SECRET_KEY": "a secret of this test, long enough",
        "AIRFLOW__API_AUTH__JWT_SECRET": "another secret of this test that is long enough for the hash that it feeds",
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin,viewer:viewer",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "AIRFLOW_CONN_ELASTICFLOW_DEFAULT": json.dumps(connection),
    }
    service = {
        **clean,
        "ELASTICFLOW_ENGINE": "fake",
        "ELASTICFLOW_VIRTUAL_NODES": "2x4",
        "ELASTICFLOW_STATE_DIR": str(home / "s"),
        "ELASTICFLOW_HOST": "127.0.0.1",
        "ELASTICFLOW_PORT": str(service_port),
        "ELASTICFLOW_TOKEN": TOKEN,
        "ELASTICFLOW_SLOT_LOCK_DIR": str(home / "locks"),
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, environment: dict[str, str], *command: str) -> None:
        with (home / f"{name}.out").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                cwd=home,
                start_new_session=True,
            )
        started.append(process)

    try:
        start("service", service, "-m", "elasticflow_airflow.service")
        (home / "dags" / "whole.py").write_text(WHOLE_DAGS)
        for command in (
            ["-m", "airflow", "db", "migrate"],
            ["-c", ADD_DAGS],
            ["-m", "airflow", "dags", "reserialize"],
        ):
            subprocess.run([sys.executable, *command], env=airflow, check=True, timeout=240, capture_output=True)
        start("api-server", airflow, "-m", "airflow", "api-server")
        endpoint = Endpoint.from_url(f"http://127.0.0.1:{service_port}", token=TOKEN)
        with ElasticFlowClient(endpoint, retry_for_s=60) as client:
            made = Site(f"http://127.0.0.1:{port}/airflow/", client)
            now = time.time()
            made.submit("nightly", 10**6, deadline_at=now + 30 * 3600)
            made.submit("fraud", 10**6, deadline_at=now + 40 * 3600)
            made.submit("ranker", 10**7, deadline_at=now + 60)  # hopeless
            made.submit("unlisted", 10**6, best_effort=True, max_workers=1)  # Airflow knows no such DAG
            wait("two jobs train", lambda: all(made.status(dag).step > 20 for dag in ("nightly", "fraud")))
            wait("one is refused", lambda: made.status("ranker").state is State.REJECTED)
            wait("Airflow is there", lambda: answers(f"{made.url}api/v2/version"), 240)
            for dag_id in ("nightly", "ranker"):
                made.add_run(dag_id, "manual__1")
            made.ask_airflow("PATCH", RANKERS_TASK, {"new_state": "failed"})
            yield made
    except BaseException:
        for log in home.glob("*.out"):
            sys.stdout.write(f"--- {log.name}\n{log.read_text()[-3000:]}\n")
        raise
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def look(site: Site, chromium: Any) -> Iterator[Callable[..., Any]]:
    """Open a page: as whom, where, how wide. What its console complains of fails the test, unless it is expected."""
    opened: list[Any] = []
    complaints: list[str] = []
    sessions: dict[str, str] = {}

    def open_page(user: str | None, path: str, *, width: int = 1280, scheme: str = "light", expect: str = "") -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.append(context)
        context.set_default_timeout(LIMIT_MS)
        if user is not None:
            session = sessions.setdefault(user, site.session(user))
            context.add_cookies([{"name": "_token", "value": session, "url": site.url}])
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda said: (
                complaints.append(f"{path}: {said.text}")
                if said.type == "error" and not (expect and expect in said.text)
                else None
            ),
        )
        page.goto(site.url + path)
        return page

    with quiet_network():
        yield open_page
        for context in opened:
            for page in context.pages:
                page.unroute_all(behavior="ignoreErrors")
            context.close()
    assert complaints == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_each_view_shows_its_matter_and_everybody_can_use_it(look: Any, site: Site, width: int, scheme: str) -> None:
    views = {
        "elasticflow/#/cluster": ["Jobs on slots", "Next 24 hours", "Last 7 days", "Submissions and waiting"],
        "elasticflow/#/jobs": ["nightly", "fraud", "Running", "spare"],
        site.job("nightly"): [
            *("Course", "Scaling", "Decisions", "Checkpoints", "Log", "What was asked for"),
            *("noise scale", "samples/s", "Logical workers", "seed "),
            "task 'publish' must end by",
        ],
        "elasticflow/#/what-if": ["Deadlines", "Capacity", "Outlook for 24 hours"],
    }
    for path, words in views.items():
        page = look("admin", path, width=width, scheme=scheme)
        view = shown(page)
        for word in words:
            assert word in view.inner_text(), (path, word)
        if "#/cluster" in path or "#/job/" in path:
            page.locator(".chart .main-svg").first.wait_for()
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, path
        check_accessibility(page, f"{path} at {width} in {scheme}")
        page.context.close()


def test_what_is_too_much_to_be_drawn_is_said_and_still_counted(look: Any) -> None:
    """As after a week with more changes of size, and more submissions, than the service tells at once."""

    def cut(route: Any) -> None:
        told = route.fetch().json()
        sums = [
            {**one, "runs": 12345, "judged": 200, "met": 150} for one in told["by_dag"] if one["dag_id"] == "nightly"
        ]
        gone = {"complete": False, "spans_from_at": told["now"] - 60, "admissions_from_at": told["now"] - 90}
        route.fulfill(json={**told, "by_dag": sums, "admissions": told["admissions"][:1], **gone})

    page = look("admin", "elasticflow/static/icon.svg")
    page.route("**/api/history*", cut)
    page.goto(page.url.replace("static/icon.svg", "#/cluster"))
    view = shown(page)
    said = [note.inner_text() for note in page.get_by_role("status").filter(has_text="So much").all()]
    assert [note.partition(" that")[0] for note in said] == ["So much was going on", "So much was submitted"]
    assert all("count all" in note for note in said)
    assert "12,345" in view.inner_text()
    assert "150 of 200" in view.inner_text()
    check_accessibility(page, "a busy week")
    everything = look("admin", "elasticflow/#/cluster")
    shown(everything)
    assert everything.get_by_text("So much was").count() == 0


def test_of_several_services_the_one_that_decides_is_named(look: Any) -> None:
    at = time.time() - 60
    replicas = [
        {"name": "ef-0", "silent_s": 1.0, "is_gone": False},
        {"name": "ef-1", "silent_s": 95.0, "is_gone": True},
    ]
    known = {"epoch": 7, "leader": "ef-0", "elected_at": at, "change": "fail-over", "failed_over_at": at}

    def with_replicas(route: Any) -> None:
        told = route.fetch().json()
        assert told["service"]["leadership"] is None, "the service of these tests is the only one"
        route.fulfill(json={**told, "service": {**told["service"], "leadership": {**known, "replicas": replicas}}})

    page = look("viewer", "elasticflow/static/icon.svg", width=390)
    page.route("**/api/cluster", with_replicas)
    page.goto(page.url.replace("static/icon.svg", "#/cluster"))
    said = shown(page).locator("[data-key=replicas]").inner_text()
    assert said.startswith("ef-0 decides since ")
    assert "by a fail-over (epoch 7). Replicas: ef-0, ef-1 (not heard of for 1 min 35 s). Last fail-over: " in said
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    check_accessibility(page, "replicas on a phone")


def test_airflows_navigation_leads_to_the_page(look: Any) -> None:
    page = look("admin", "")
    page.get_by_role("button", name="Browse").click()
    page.get_by_role("menuitem", name="ElasticFlow").click()
    frame = page.frame_locator("iframe[title=ElasticFlow]")
    frame.get_by_role("heading", name="Jobs on slots").wait_for()
    frame.get_by_role("link", name="Jobs", exact=True).click()
    frame.get_by_role("row").get_by_role("link", name="nightly · train").wait_for()
    wait("Airflow's address names the view", lambda: page.url.endswith("#/jobs"))
    page.reload()
    page.frame_locator("iframe[title=ElasticFlow]").get_by_role("link", name="nightly · train").wait_for()


def test_the_button_on_a_task_leads_to_its_job(look: Any, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from elasticflow_airflow import links

    monkeypatch.setattr(links.conf, "get", lambda *_, **__: site.url.rstrip("/"))
    page = look("viewer", links.job_url("nightly", "manual__1", "train").removeprefix(site.url))
    page.frame_locator("iframe[title=ElasticFlow]").get_by_role("heading", name="nightly · train").wait_for()


def test_the_tab_of_a_run_shows_its_jobs(look: Any) -> None:
    page = look("viewer", "dags/nightly/runs/manual__1")
    page.get_by_role("link", name="ElasticFlow", exact=True).click()
    frame = page.frame_locator("iframe[title=ElasticFlow]")
    frame.get_by_role("link", name="nightly · train").wait_for()
    assert frame.get_by_role("link", name="fraud · train").count() == 0
    assert page.url.partition("#")[0].endswith("runs/manual__1/plugin/elasticflow-run")


def test_the_tab_of_a_task_instance_shows_its_job(look: Any) -> None:
    page = look("viewer", "dags/nightly/runs/manual__1/tasks/train")
    page.get_by_role("link", name="ElasticFlow", exact=True).click()
    page.frame_locator("iframe[title=ElasticFlow]").get_by_role("heading", name="nightly · train").wait_for()
    assert page.url.partition("#")[0].endswith("runs/manual__1/tasks/train/plugin/elasticflow-task")


def test_the_tab_of_another_task_says_that_it_has_no_job(look: Any) -> None:
    page = look("viewer", "dags/nightly/runs/manual__1/tasks/report")
    page.get_by_role("link", name="ElasticFlow", exact=True).click()
    page.frame_locator("iframe[title=ElasticFlow]").get_by_role("heading", name="No ElasticFlow job here").wait_for()


def test_the_page_finds_a_job_by_its_address(look: Any) -> None:
    query = "dag_id=nightly&run_id=manual__1&task_id=train&map_index=%7BMAP_INDEX%7D"
    page = look("viewer", f"elasticflow/?{query}")
    page.get_by_role("heading", name="nightly · train").wait_for()
    other = look("viewer", "elasticflow/?dag_id=nightly&run_id=manual__1&task_id=report")
    other.get_by_role("heading", name="No ElasticFlow job here").wait_for()


def test_a_job_moves_on_without_reloading(look: Any) -> None:
    page = look("viewer", "elasticflow/#/jobs")
    bar = page.get_by_role("progressbar", name="Progress of nightly · train")
    page.evaluate("window.notReloaded = true")
    before = int(bar.get_attribute("aria-valuenow"))
    wait("progress", lambda: int(bar.get_attribute("aria-valuenow")) > before + 20)
    assert page.evaluate("window.notReloaded") is True


def test_typing_into_the_filter_survives_updates(look: Any) -> None:
    page = look("viewer", "elasticflow/#/jobs")
    page.get_by_label("Filter jobs").fill("nigh")
    page.get_by_role("link", name="fraud · train").wait_for(state="detached")
    bar = page.get_by_role("progressbar", name="Progress of nightly · train")
    before = int(bar.get_attribute("aria-valuenow"))
    wait("an update", lambda: int(bar.get_attribute("aria-valuenow")) > before)
    assert page.get_by_label("Filter jobs").input_value() == "nigh"
    assert page.evaluate("document.activeElement.type") == "search"


def test_the_keyboard_goes_from_job_to_job_and_opens_one(look: Any) -> None:
    page = look("viewer", "elasticflow/#/cluster")
    shown(page)
    page.locator(".gantt a.bar[tabindex='0']").focus()
    first = page.evaluate("document.activeElement.getAttribute('href')")
    page.keyboard.press("ArrowRight")
    wait("the next job", lambda: page.evaluate("document.activeElement.getAttribute('href')") != first)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Decisions").wait_for()


def test_jobs_of_unknown_dags_hold_slots_without_a_name(look: Any) -> None:
    page = look("admin", "elasticflow/#/cluster")
    shown(page)
    assert page.locator(".gantt [aria-label^='Another job']").count() >= 1
    assert "unlisted" not in page.content()


def test_nobody_gets_in_without_signing_in(look: Any, site: Site) -> None:
    page = look(None, "elasticflow/", expect="401")
    page.get_by_role("heading", name="Please sign in").wait_for()
    for path in (
        "api/jobs",
        "api/cluster",
        "static/main.js",
        f"api/dags/nightly/jobs/{site.jobs['nightly'].job_id}/story",
    ):
        assert page.evaluate("path => fetch(path).then(answer => answer.status)", path) == 401


def test_a_viewer_cannot_cancel(look: Any, site: Site) -> None:
    page = look("viewer", site.job("nightly"), expect="403")
    page.get_by_role("heading", name="Decisions").wait_for()
    assert page.get_by_role("button", name="Cancel job").count() == 0
    assert page.get_by_role("button", name="Change deadline").count() == 0
    path = f"api/dags/nightly/jobs/{site.jobs['nightly'].job_id}/cancel"
    post = "path => fetch(path, {method: 'POST', body: '{\"claim\": 99}'}).then(answer => answer.status)"
    assert page.evaluate(post, path) == 403
    assert site.status("nightly").state is State.RUNNING


def test_an_administrator_moves_a_deadline_by_what_if(look: Any, site: Site) -> None:
    before = site.status("nightly").deadline_at
    assert before is not None
    page = look("admin", "elasticflow/#/what-if")
    page.get_by_role("button", name="nightly · train: deadline 30 minutes later").click()
    page.get_by_role("button", name="Apply").click()
    page.get_by_role("dialog").get_by_role("button", name="Apply").click()
    page.get_by_text("The deadline was changed.").first.wait_for()
    assert site.status("nightly").deadline_at == pytest.approx(before + 1800, abs=60)


def test_a_deadline_and_the_capacity_are_dragged_or_moved_by_keys(look: Any, site: Site) -> None:
    page = look("admin", "elasticflow/#/what-if")
    slider = page.get_by_label("Move the deadline of nightly · train")
    slider.wait_for()
    field = page.get_by_label("Deadline of nightly · train", exact=True)
    undo = page.get_by_role("button", name="Undo")
    before = field.input_value()
    box = slider.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    undo.wait_for()
    dragged = field.input_value()
    assert dragged != before
    slider.press("ArrowRight")
    wait("five minutes later", lambda: field.input_value() > dragged)
    page.get_by_role("button", name="Apply").wait_for()  # the scheduler's verdict is there
    undo.click()
    wait("as before", lambda: field.input_value() == before)
    page.get_by_role("slider", name="More nodes").press("ArrowRight")
    wait("one node more", lambda: page.locator(".stepper output").inner_text() == "1")
    check_accessibility(page, "dragging")
    assert site.status("nightly").deadline_at == pytest.approx(site.jobs["nightly"].deadline_at, abs=1801)


def test_a_viewer_reads_why_a_job_was_rejected_and_changes_nothing(look: Any, site: Site) -> None:
    page = look("viewer", site.job("ranker"))
    card = page.get_by_role("region", name="What can be done")
    card.get_by_text("The earliest feasible deadline was").wait_for()
    assert card.get_by_role("button").count() == 0
    assert card.get_by_role("link", name="Open the task").count() == 1
    for name in ("Course", "Scaling", "Checkpoints"):  # empty charts
        assert page.get_by_role("heading", name=name).count() == 0


def test_a_rejected_job_is_submitted_for_a_later_deadline(look: Any, site: Site) -> None:
    page = look("admin", "elasticflow/")
    item = page.get_by_role("region", name="Needs attention").get_by_role("listitem").filter(has_text="ranker")
    item.get_by_role("button", name="Submit for").wait_for()
    check_accessibility(page, "a rejected job")
    item.get_by_role("button", name="Submit for").click()
    page.get_by_role("dialog").get_by_role("button", name="Submit").click()
    page.get_by_text("The task was cleared: its new attempt asks for the deadline").first.wait_for()
    assert site.ask_airflow("GET", RANKERS_TASK)["state"] is None
    rejected = site.status("ranker")
    assert rejected.state is State.REJECTED, "until Airflow has started the task again"
    again = site.submit("ranker", 10**7, deadline_at=rejected.deadline_at)
    assert again.verdict.decision == "admitted"
    earliest_at = rejected.verdict.earliest_deadline_at
    assert again.deadline_at is not None
    assert earliest_at is not None
    assert 0 < again.deadline_at - earliest_at - (time.time() - rejected.submitted_at) < 130
    site.service.cancel(again.job_id, again.claim, "enough")


def test_a_change_that_would_be_refused_is_shown_as_refused(look: Any) -> None:
    page = look("admin", "elasticflow/#/what-if")
    sooner = time.strftime("%Y-%m-%dT%H:%M", time.localtime(time.time() + 3600))
    page.get_by_label("Deadline of nightly · train", exact=True).fill(sooner)
    page.get_by_text("1 change would be refused, and nothing would come of it").first.wait_for()
    then = page.get_by_role("row").filter(has_text="nightly").get_by_role("cell").nth(2)
    assert "Refused" in then.inner_text()


def test_a_forecast_that_does_not_come_is_no_calm(look: Any) -> None:
    page = look("viewer", "elasticflow/#/jobs", expect="503")
    page.route("**/forecast*", lambda route: route.fulfill(status=503, json={"detail": "it has too much to do"}))
    page.get_by_role("link", name="Cluster").first.click()
    page.get_by_text("Unknown: the forecast did not come.").wait_for()
    page.get_by_text("the forecast did not come", exact=True).wait_for()
    assert page.get_by_text("on track").count() == 0
    assert page.get_by_text("nothing at risk").count() == 0


def test_the_log_goes_on_and_the_workers_say_what_they_do(look: Any, site: Site) -> None:
    page = look("viewer", site.job("nightly"))
    log = page.locator("#log")
    wait("the end of the log", lambda: "step" in log.inner_text())
    before = log.inner_text()
    wait("more of it", lambda: log.inner_text() != before)
    page.get_by_role("button", name="Dump stacks").click()
    page.get_by_text("The stacks are below the log.").first.wait_for()


def test_a_job_is_saved_as_one_file_and_as_a_trace(look: Any, site: Site, tmp_path: Path) -> None:
    page = look("viewer", site.job("nightly"))
    page.locator("#chart-story .main-svg").first.wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as page").click()
    saved = tmp_path / "saved.html"
    download.value.save_as(saved)
    text = saved.read_text()
    assert "nightly · train" in text
    assert "data:image/svg+xml" in text
    assert "<script src" not in text
    assert "<link" not in text
    assert json.loads(text.split('id="data">')[1].split("</script>")[0])["story"]["status"]["job_id"] in site.job(
        "nightly"
    )
    with page.expect_download() as download:
        page.get_by_role("link", name="Save trace").click()
    download.value.save_as(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert any(event["ph"] == "X" for event in trace["traceEvents"])


def test_an_administrator_cancels(look: Any, site: Site) -> None:
    page = look("admin", site.job("fraud"))
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("dialog").get_by_role("button", name="Keep it").click()
    assert site.status("fraud").state is State.RUNNING
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
    page.locator("h1 .chip", has_text="Cancelled").wait_for()
    wait("the service has cancelled it", lambda: site.status("fraud").state is State.CANCELLED)
    assert "admin" in site.status("fraud").state_reason


@pytest.mark.parametrize(
    ("code", "heading"),
    [
        ("not_started", "No service is running yet"),
        ("away", "The service does not answer"),
        ("version", "another version"),
    ],
)
def test_a_missing_service_is_a_friendly_state(look: Any, code: str, heading: str) -> None:
    page = look("admin", "elasticflow/static/icon.svg", expect="503")
    problem = json.dumps({"error": code, "message": "nobody answers", "hint": "start it"})
    page.route("**/api/cluster", lambda route: route.fulfill(status=503, content_type="application/json", body=problem))
    page.goto(page.url.replace("static/icon.svg", "#/cluster"))
    page.get_by_role("heading", name=heading).wait_for()
    check_accessibility(page, code)

"""Who may see and change what through the page, with Airflow's own authorization, and what reaches the service."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import pytest
from fastapi.routing import APIRoute
from support.scripted_cluster import FOREIGN, HIDDEN, TASKS, ScriptedCluster, identity
from support.scripted_course import NODES

from elasticflow_airflow.api import Event, JobIdentity, LeaderStatus, ReplicaStatus

MINE = identity("fraud_daily")
JOB = f"api/dags/fraud_daily/jobs/{MINE.job_id}"
READS = ["story", "events", "runs", "logs/w0", "trace.json"]
LISTS = ["api/cluster", "api/history?from_at=1&until_at=1000", "api/forecast", "api/jobs", "api/attention"]


def test_nobody_gets_anything_without_signing_in(browse: Any, cluster: ScriptedCluster, source: Any) -> None:
    from elasticflow_airflow.ui.api_app import build_app

    anonymous = browse()
    routes = [route for route in build_app(source).routes if isinstance(route, APIRoute)]
    assert len(routes) >= 14
    for route in routes:
        path = route.path.lstrip("/").replace("{path:path}", "main.js")
        path = path.format(dag_id="fraud_daily", job_id=MINE.job_id, log_name="w0")
        for method in route.methods:
            answer = anonymous.request(method, path, json={})
            assert answer.status_code == 401, (method, path)
            assert "fraud" not in answer.text
    assert cluster.asked == []


def test_no_route_asks_for_its_user_in_the_address(source: Any) -> None:
    """What FastAPI makes of a dependency whose name it cannot resolve: every call would be refused for want of it."""
    from elasticflow_airflow.ui.api_app import build_app

    asked = {
        parameter["name"]
        for path in build_app(source).openapi()["paths"].values()
        for route in path.values()
        for parameter in route.get("parameters", ())
        if parameter["in"] == "query"
    }
    assert "limit" in asked, "the page's routes do take something from the address"
    assert not asked & {"user", "session", "_user", "_", "auth_manager", "request"}


def test_a_forged_session_gets_nothing(browse: Any) -> None:
    browser = browse()
    browser.cookies.set("_token", "forged")
    assert browser.get("api/jobs").status_code == 403


def test_lists_show_the_dags_that_the_user_may_read(browse: Any) -> None:
    for role, shown in (("viewer", False), ("admin", True)):
        browser = browse(role)
        for path in LISTS:
            text = browser.get(path).text
            assert ("payroll" in text) is shown, (role, path)
            assert FOREIGN.job_id not in text  # another Airflow's, though its DAG has a name that may be read


def test_slots_of_hidden_jobs_are_taken_but_nameless(browse: Any) -> None:
    told = browse("viewer").get("api/cluster").json()
    taken = [slot for slot in told["slots"] if (slot["node_id"], slot["index"]) == ("gpu-b", 3)]
    assert [(slot["job_id"], slot["busy"]) for slot in taken] == [(None, "another job")]
    assert told["hidden_jobs"] == 2
    spans = browse("viewer").get("api/history?from_at=1&until_at=1000").json()["planned"]
    assert any(span["job_id"] == "" and span["slots"] for span in spans)


def test_sums_are_of_the_dags_that_the_user_may_read(browse: Any, cluster: ScriptedCluster) -> None:
    span = {"from_at": cluster.now - 7 * 86400, "until_at": cluster.now}
    for role, seen in (("viewer", set(TASKS)), ("admin", {*TASKS, "payroll"})):
        sums = browse(role).get("api/history", params=span).json()["by_dag"]
        assert {one["dag_id"] for one in sums} == seen
        assert {one["namespace"] for one in sums} == {"default"}


def test_sentences_call_jobs_by_names_that_the_user_may_know(browse: Any, cluster: ScriptedCluster) -> None:
    risky = identity("search_ranker").job_id
    assert (
        browse("viewer").get("api/cluster").json()["why"][risky]
        == "holds 1 slot until it ends, as another job needs the others"
    )
    assert "as payroll.train needs" in browse("admin").get("api/cluster").json()["why"][risky]
    reasons = [event["reason"] for event in browse("viewer").get(f"{JOB}/events").json()]
    assert "starts with 1 worker: another job holds the others" in reasons


def test_no_route_names_a_dag_that_may_not_be_read(browse: Any, cluster: ScriptedCluster, manager: Any) -> None:
    manager.only = "fraud_daily"
    cluster.problems = [
        f"IntegrityError(['default', 'payroll', 'train'], {HIDDEN.job_id!r})",
        f"{HIDDEN.job_id} is set aside: the service failed while planning it: KeyError: 'payroll'",
        f"{MINE.job_id} is set aside: the service failed while planning it beside {HIDDEN.job_id}: TypeError",
    ]
    editor = browse("user")
    change = {"claim": 2, "deadline_at": cluster.now + 9000}
    answers = {path: editor.get(path) for path in [*LISTS, *(f"{JOB}/{what}" for what in READS)]}
    answers["history"] = editor.get("api/history", params={"from_at": cluster.now - 9e5, "until_at": cluster.now + 9e5})
    answers["stacks"] = editor.post(f"{JOB}/stacks")
    answers["what-if"] = editor.post("api/what-if", json={"changes": [{"job_id": MINE.job_id, "deadline_at": 1.9e9}]})
    answers["amend"] = editor.patch(JOB, json=change)
    answers["stale"] = editor.post(f"{JOB}/cancel", json={"claim": 1})
    answers["cancel"] = editor.post(f"{JOB}/cancel", json={"claim": 2})
    secret = ("payroll", "secretteam", "elsewhere", "nightly", "search", "vision")
    for route, answer in answers.items():
        assert answer.status_code == (409 if route == "stale" else 200), route
        assert [name for name in secret if name in answer.text] == [], route
    said = answers[f"{JOB}/story"].json()["why"]
    assert said == f"holds 2 slots until {cluster.clock(1.9)}, then 4: another job and another job need them"
    assert answers["cancel"].json()["state_reason"] == "holds 2 slots beside another job"
    assert answers["api/cluster"].json()["service"]["problems"] == [
        "Its log says which: the text may name what you may not see.",
        "A job that you may not see is set aside, as the service failed on it; all others go on.",
        "fraud_daily.finetune is set aside: the service failed while planning it beside another job: TypeError",
    ]


def test_who_decides_is_told_by_host_and_never_by_address(browse: Any, source: Any, cluster: ScriptedCluster) -> None:
    assert browse("viewer").get("api/cluster").json()["service"]["leadership"] is None
    replicas = [
        ReplicaStatus(replica_id=f"{name}" * 32, role=role, url="http://10.0.0.5:8321", host=host, silent_s=2.0)
        for name, role, host in (("a", "leader", "ef-0"), ("b", "follower", "ef-1"), ("c", "follower", "ef-1"))
    ]
    known = LeaderStatus(epoch=3, leader="a" * 32, elected_at=5.0, change="start", replicas=replicas)
    cluster.leadership = known
    here = {"silent_s": 2.0, "is_gone": False}
    source.forget()
    told = browse("viewer").get("api/cluster").json()
    assert told["service"]["leadership"] == {
        "epoch": 3,
        "leader": "ef-0",
        "elected_at": 5.0,
        "change": "start",
        "failed_over_at": None,
        "replicas": [{"name": "ef-0", **here}, {"name": "bbbbbbbb", **here}, {"name": "cccccccc", **here}],
    }
    assert "10.0.0.5" not in json.dumps(told)


def test_the_service_says_which_tasks_a_sentence_names(browse: Any, cluster: ScriptedCluster) -> None:
    """Also those that no list of jobs tells of: runs that are expected, of other Airflows even."""
    said = f"holds 2 slots until {cluster.clock(1.9)}, then 4: another job and nightly_reviews.train need them"
    browser = browse("viewer")
    assert browser.get("api/jobs").json()["why"][MINE.job_id] == said
    assert browser.get("api/cluster").json()["why"][MINE.job_id] == said
    assert browser.get(f"{JOB}/story").json()["why"] == said


def test_an_old_job_is_called_by_its_name_in_its_own_story(
    browse: Any, cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticflow_airflow.ui.api_app._RECENT", 1)
    old = identity("search_ranker", "manual__1d")
    monkeypatch.setattr(ScriptedCluster, "_events", lambda *_: [event_of(old, f"{old.job_id} was rejected")])
    path = f"api/dags/search_ranker/jobs/{old.job_id}"
    (event,) = browse("viewer").get(f"{path}/events").json()
    assert event["reason"] == "search_ranker.train was rejected"
    assert "search_ranker.train was rejected" in browse("viewer").get(f"{path}/trace.json").text


def event_of(who: JobIdentity, reason: str) -> Event:
    return Event(event_id=1, job_id=who.job_id, incarnation=1, at=1.0, kind="rejected", reason=reason)


@pytest.mark.parametrize("what", READS)
def test_one_job_needs_the_right_to_read_its_dag(browse: Any, what: str) -> None:
    hidden = f"api/dags/payroll/jobs/{HIDDEN.job_id}/{what}"
    assert browse("viewer").get(f"{JOB}/{what}").status_code == 200
    assert browse("viewer").get(hidden).status_code == 403
    assert browse("admin").get(hidden).status_code == 200


@pytest.mark.parametrize("what", READS)
def test_a_job_is_not_reached_through_another_dag_or_namespace(browse: Any, what: str) -> None:
    for who in (HIDDEN, FOREIGN):
        answer = browse("viewer").get(f"api/dags/fraud_daily/jobs/{who.job_id}/{what}")
        assert answer.status_code == 404
        assert answer.json()["message"] == f"DAG 'fraud_daily' has no job '{who.job_id}'"


def test_only_an_editor_of_the_dag_cancels(browse: Any, cluster: ScriptedCluster) -> None:
    refused = browse("viewer").post(f"{JOB}/cancel", json={"claim": 2})
    assert (refused.status_code, cluster.cancelled) == (403, set())
    assert browse("user").post(f"{JOB}/cancel", json={"claim": 2}).status_code == 200
    assert cluster.cancelled == {MINE.job_id}
    sent = next(told for method, path, told in cluster.asked if path.endswith("/cancel"))
    assert sent == {"claim": 2, "reason": "cancelled by user on the ElasticFlow page"}
    jobs = {job["job_id"]: job["state"] for job in browse("viewer").get("api/jobs").json()["jobs"]}
    assert jobs[MINE.job_id] == "cancelled"  # no answer from before is shown


def test_an_editor_does_not_cancel_through_a_dag_that_may_be_edited(browse: Any, cluster: ScriptedCluster) -> None:
    answer = browse("user").post(f"api/dags/fraud_daily/jobs/{HIDDEN.job_id}/cancel", json={"claim": 2})
    assert (answer.status_code, cluster.cancelled) == (404, set())


def test_a_stale_claim_is_said_to_be_one(browse: Any) -> None:
    answer = browse("admin").post(f"{JOB}/cancel", json={"claim": 1})
    assert (answer.status_code, answer.json()["error"]) == (409, "stale_claim")


def test_only_an_editor_moves_a_deadline(browse: Any, cluster: ScriptedCluster) -> None:
    change = {"claim": 2, "deadline_at": cluster.now + 9000}
    assert browse("viewer").patch(JOB, json=change).status_code == 403
    assert cluster.deadlines == {}
    assert browse("user").patch(JOB, json=change).json()["accepted"] is True
    assert cluster.deadlines == {MINE.job_id: cluster.now + 9000}


@pytest.mark.parametrize("who", [HIDDEN, FOREIGN], ids=["hidden", "foreign"])
def test_an_editor_moves_no_deadline_through_a_dag_that_may_be_edited(
    browse: Any, cluster: ScriptedCluster, who: JobIdentity
) -> None:
    change = {"claim": 2, "deadline_at": cluster.now + 9000}
    answer = browse("user").patch(f"api/dags/fraud_daily/jobs/{who.job_id}", json=change)
    assert (answer.status_code, cluster.deadlines) == (404, {})
    assert answer.json()["message"] == f"DAG 'fraud_daily' has no job '{who.job_id}'"


def test_who_may_read_the_logs_asks_what_the_workers_do(browse: Any, cluster: ScriptedCluster) -> None:
    assert set(browse("viewer").post(f"{JOB}/stacks").json()["stacks"]) == {"w0", "w1"}
    cluster.asked.clear()
    hidden = f"api/dags/payroll/jobs/{HIDDEN.job_id}/stacks"
    assert browse("viewer").post(hidden).status_code == 403
    assert cluster.asked == []
    for who in (HIDDEN, FOREIGN):
        assert browse("viewer").post(f"api/dags/fraud_daily/jobs/{who.job_id}/stacks").status_code == 404
    assert not [path for _, path, _ in cluster.asked if path.endswith("/stacks")]
    assert browse("admin").post(hidden).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "sent"),
    [
        ("POST", f"{JOB}/cancel", {"claim": 2}),
        ("PATCH", JOB, {"claim": 2, "deadline_at": 1.9e9}),
        ("POST", f"{JOB}/stacks", None),
        ("POST", "api/what-if", {}),
    ],
)
def test_changes_from_other_sites_are_refused(
    browse: Any, cluster: ScriptedCluster, method: str, path: str, sent: Any
) -> None:
    browser = browse("admin")
    for foreign in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
        assert browser.request(method, path, json=sent, headers=foreign).status_code == 403
    assert cluster.asked == []
    assert browser.request(method, path, json=sent).status_code == 200


def test_what_if_is_asked_about_visible_jobs_only(browse: Any, cluster: ScriptedCluster) -> None:
    def ask(role: str, job_id: str) -> Any:
        change = {"job_id": job_id, "deadline_at": cluster.now + 60}
        return browse(role).post("api/what-if", json={"changes": [change]})

    answer = ask("viewer", MINE.job_id).json()
    assert answer["verdicts"][0]["verdict"]["decision"] == "rejected"
    assert {item["dag_id"] for item in answer["after"]["items"]} <= {
        "nightly_reviews",
        "fraud_daily",
        "search_ranker",
        "vision",
    }
    assert ask("viewer", HIDDEN.job_id).status_code == 404
    assert ask("admin", HIDDEN.job_id).status_code == 200
    assert cluster.deadlines == {}


def test_the_token_stays_on_the_server(browse: Any, source: Any) -> None:
    token = source._look_up().endpoint.token
    browser = browse("admin")
    for path in ["", "static/main.js", "api/me", *LISTS, *(f"{JOB}/{what}" for what in READS)]:
        answer = browser.get(path)
        assert answer.status_code == 200, path
        assert token not in answer.text + str(answer.headers)


def test_a_service_that_is_away_is_said_to_be_away(browse: Any, cluster: ScriptedCluster) -> None:
    cluster.away = True
    answer = browse("viewer").get("api/cluster")
    assert (answer.status_code, answer.json()["error"]) == (503, "away")
    assert "elasticflow serve" in answer.json()["hint"]


def test_running_jobs_say_when_they_end_at_the_latest(browse: Any, cluster: ScriptedCluster) -> None:
    browser = browse("viewer")
    latest = browser.get("api/latest").json()
    assert MINE.job_id in latest
    assert HIDDEN.job_id not in latest
    projected = next(job for job in cluster.jobs() if job.job_id == MINE.job_id).projected_finish_at or 0.0
    assert projected < latest[MINE.job_id] < projected + 3600
    assert browser.get(f"{JOB}/story").json()["latest_at"] == pytest.approx(latest[MINE.job_id], abs=5)
    assert identity("vision").job_id not in latest


def test_what_needs_attention_is_of_the_dags_that_the_user_may_read(browse: Any) -> None:
    items = browse("viewer").get("api/attention").json()["items"]
    assert [(one["trouble"], one["job"]["identity"]["dag_id"]) for one in items] == [
        ("late", "search_ranker"),
        ("unowned", "vision"),
    ]
    late, unowned = (one["sentence"] for one in items)
    assert late == "is projected to finish 12 min after its deadline"
    assert re.fullmatch(r"has had no owner for 10 min( \d+ s)?: nobody has asked for it", unowned)
    everything = browse("admin").get("api/attention").json()["items"]
    assert {one["job"]["identity"]["dag_id"] for one in everything} == {"search_ranker", "vision", "payroll"}


def test_pages_of_a_list_go_on_where_the_one_before_ended(browse: Any, cluster: ScriptedCluster) -> None:
    done = cluster._ended("vision", 2)
    named = [identity("vision", f"scheduled__{number}") for number in range(25)]
    cluster.further = [
        done.model_copy(update={"job_id": one.job_id, "identity": one, "submitted_at": cluster.now - 1e5 - at})
        for at, one in enumerate(named)
    ]
    browser = browse("viewer")
    found: list[str] = []
    cursor = ""
    while True:
        page = browser.get("api/jobs", params={"limit": 10, "cursor": cursor} if cursor else {"limit": 10}).json()
        found += [job["job_id"] for job in page["jobs"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert len(found) == len(set(found))
    assert set(found) >= {one.job_id for one in named}
    assert HIDDEN.job_id not in found


def test_filters_reach_the_service(browse: Any, cluster: ScriptedCluster) -> None:
    browser = browse("viewer")
    assert browser.get("api/jobs", params={"state": "running", "text": "fraud daily", "live": True}).status_code == 200
    assert cluster.listed[-1] == {
        "state": "running",
        "text": "fraud daily",
        "live": "true",
        "limit": "301",
        "namespace": "default",
    }
    assert browser.get("api/jobs", params={"text": "a\0b"}).status_code == 422
    assert browser.get("api/jobs", params={"state": "asleep"}).status_code == 422


def test_one_task_instance_finds_its_job(browse: Any) -> None:
    query = {"dag_id": "vision", "run_id": "scheduled__today", "task_id": "backbone", "map_index": -1}
    jobs = browse("viewer").get("api/jobs", params=query).json()["jobs"]
    assert [job["identity"]["task_id"] for job in jobs] == ["backbone"]
    assert browse("viewer").get("api/jobs", params={**query, "run_id": "another"}).json()["jobs"] == []


def more_jobs(cluster: ScriptedCluster, count: int, **changes: Any) -> None:
    """Newer jobs than all others."""
    like = cluster.jobs()[0]
    for n in range(count):
        who = MINE.model_copy(update={"run_id": f"backfill__{n}", **changes})
        update = {"job_id": who.job_id, "identity": who, "submitted_at": cluster.now + n, "workers": 0}
        cluster.further.append(like.model_copy(update=update))


def test_an_old_run_of_a_busy_dag_is_found(browse: Any, cluster: ScriptedCluster) -> None:
    more_jobs(cluster, 8)
    query = {"dag_id": "fraud_daily", "run_id": "scheduled__1d", "limit": 3}
    jobs = browse("viewer").get("api/jobs", params=query).json()["jobs"]
    assert [job["job_id"] for job in jobs] == [identity("fraud_daily", "scheduled__1d").job_id]


@pytest.mark.parametrize("others", [{"dag_id": "payroll"}, {"namespace": "elsewhere"}], ids=str)
@pytest.mark.parametrize("address", [4000, 30])
def test_a_viewers_jobs_do_not_vanish_behind_those_of_others(
    browse: Any, cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch, others: dict[str, str], address: int
) -> None:
    monkeypatch.setattr("elasticflow_airflow.ui.api_app._ADDRESS_AT_MOST", address)
    before = browse("viewer").get("api/jobs", params={"limit": 4}).json()["jobs"]
    assert len(before) == 4
    more_jobs(cluster, 9, **others)
    after = browse("viewer").get("api/jobs", params={"limit": 4, "text": "a"}).json()["jobs"]  # not shared
    assert [job["job_id"] for job in after] == [job["job_id"] for job in before]
    assert browse("viewer").get("api/jobs", params={"dag_id": "payroll"}).json()["jobs"] == []


def test_the_trace_opens_in_trace_viewers(browse: Any, cluster: ScriptedCluster) -> None:
    answer = browse("viewer").get(f"{JOB}/trace.json")
    assert f'filename="{MINE.job_id}-1.trace.json"' in answer.headers["content-disposition"]
    events = answer.json()["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i", "C"}
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in slices)
    assert {"starting", "1 worker", "2 workers"} <= {event["name"] for event in slices}
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {"decisions", *(f"{NODES[1]} slot {index}" for index in range(4))}


SHADES = {str(number): {"value": f"oklch(0.5 0.2 {number})"} for number in (50, *range(100, 1000, 100), 950)}


@pytest.mark.parametrize(
    ("theme", "known"),
    [
        ({"tokens": {"colors": {"brand": SHADES}}}, True),
        ({"tokens": {"colors": {"brand": {**SHADES, "700": {"value": "red; } body { display: none"}}}}}, False),
        ({"tokens": {"colors": {"brand": {"700": {"value": "#ff0000"}}}}}, False),
        ({"tokens": {"colors": []}}, False),
        ([], False),
    ],
)
def test_the_brand_colour_is_that_of_airflows_configuration(
    browse: Any, monkeypatch: Any, theme: Any, known: bool
) -> None:
    from elasticflow_airflow.ui import airflow_theme

    monkeypatch.setenv("AIRFLOW__API__THEME", json.dumps(theme))
    airflow_theme.brand_colours.cache_clear()
    try:
        brand = browse("viewer").get("api/me").json()["brand"]
    finally:
        airflow_theme.brand_colours.cache_clear()
    assert brand == ({n: SHADES[n]["value"] for n in ("100", "300", "700", "900", "950")} if known else None)


def test_files_are_ours_packed_and_asked_for_once(browse: Any) -> None:
    browser = browse("viewer")
    page = browser.get("")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "http" not in page.text.replace("http-equiv", "").replace("http://www.w3.org", "")
    library = browser.get("api/me").json()["chart_library"]
    packed = browser.get(library)
    assert "immutable" in packed.headers["cache-control"]
    assert len(packed.content) > 1_000_000
    assert int(packed.headers["content-length"]) < len(packed.content) / 2
    again = browser.get("static/main.js", headers={"If-None-Match": browser.get("static/main.js").headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for path in ("static/../api_app.py", "static/%2e%2e/api_app.py", "static/views", "static/nothing.js"):
        assert browser.get(path).status_code == 404, path


def test_every_module_that_the_page_imports_is_there() -> None:
    import re

    from elasticflow_airflow.ui.assets import _ours, asset

    for name in sorted(_ours()):
        found = asset(name)
        assert found is not None
        assert gzip.decompress(found.packed) == found.content
        for imported in re.findall(r"from '([./\w-]+\.js)'", found.content.decode()):
            folder = name.rpartition("/")[0]
            parts = [part for part in f"{folder}/{imported}".split("/") if part not in ("", ".")]
            while ".." in parts:
                at = parts.index("..")
                del parts[at - 1 : at + 1]
            assert "/".join(parts) in _ours(), (name, imported)


def test_answers_are_shared_between_users_but_not_for_long(browse: Any, cluster: ScriptedCluster) -> None:
    for role in ("viewer", "admin", "viewer"):
        browse(role).get("api/forecast")
    assert sum(path == "/v1/forecast" for _, path, _ in cluster.asked) == 1


def test_nonsense_is_refused_before_it_reaches_the_service(browse: Any, cluster: ScriptedCluster) -> None:
    browser = browse("admin")
    for path in (
        "api/history?from_at=10&until_at=1",
        "api/history?from_at=0&until_at=4e9",
        "api/history?from_at=nan&until_at=1",
        "api/jobs?limit=0",
        "api/dags/fraud_daily/jobs/..%2F..%2Fhealth/story",
        f"{JOB}/logs/a.b",
    ):
        assert browser.get(path).status_code in (404, 422), path
    assert browser.post(f"{JOB}/cancel", content=json.dumps({})).status_code == 422
    assert cluster.asked == []

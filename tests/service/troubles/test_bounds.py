"""Every number and text of a request is held to bounds: 422 names the field, the limit and the remedy."""

from __future__ import annotations

import json
import math
import random
import string
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from support.service_parts import insight_of, parts_of

from elasticflow_airflow import bounds
from elasticflow_airflow.api import JobIdentity, JobSubmission, Problem
from elasticflow_airflow.api.fields import OUT_OF_BOUNDS
from elasticflow_airflow.client import snapshot_folder
from elasticflow_airflow.service.http.app import build_app
from elasticflow_airflow.service.http.openapi import document
from elasticflow_airflow.service.store.documents.submission import StoredSubmission
from elasticflow_airflow.service.store.stored_bounds import submission_out_of_bounds

MILLISECONDS = 1_800_000_000_000
SECRET = "hunter2-of-the-hub"
LONG = "x" * 1_000_000
OVERLONG_NAME = f"/models/{'x' * 300}"


SUBMISSION = {
    "identity": {"dag_id": "daily", "run_id": "run1", "task_id": "train"},
    "command": {"snapshot": "0" * 64, "script": "train.py"},
    "length": {"steps": 200},
    "global_batch_size": 32,
    "deadline_at": 1_800_000_600.0,
    "secret_env": {"TOKEN": SECRET},
}


@pytest.fixture
async def http(world) -> AsyncIterator[httpx.AsyncClient]:
    async with asking(world) as client:
        yield client


@asynccontextmanager
async def asking(world) -> AsyncIterator[httpx.AsyncClient]:
    """The routes over a service in this process."""
    transport = httpx.ASGITransport(build_app(parts_of(world), None), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        yield client


def changed(raw: dict, path: str, value: object) -> dict:
    """The JSON with another value somewhere in it."""
    head, _, rest = path.partition(".")
    return {**raw, head: changed(raw.get(head) or {}, rest, value) if rest else value}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("deadline_at", MILLISECONDS, "look like milliseconds: divide them by 1000"),
        ("deadline_at", MILLISECONDS * 1e6, "look like nanoseconds"),
        ("deadline_at", -1.0, "between 1970 and 2100"),
        ("latest_deadline_at", MILLISECONDS, "milliseconds"),
        ("due_at", MILLISECONDS, "milliseconds"),
        ("next_run_at", MILLISECONDS, "milliseconds"),
        ("next_runs_at", [MILLISECONDS], "milliseconds"),
        ("length.steps", 10**19, "at most 2147483647: give less"),
        ("length.steps", 3 * 10**9, "at most 2147483647"),
        ("length", {"epochs": 10**9, "samples": 10**9}, "epochs=1000000000 of samples=1000000000"),
        ("global_batch_size", 2**31, "at most 2147483647"),
        ("logical_workers", 2**62, "at most 1048576"),
        ("max_workers", 2**62, "at most 1048576"),
        ("min_workers", 2**62, "at most 1048576"),
        ("value", 1e300, "at most 1000000000000"),
        ("value", 5e-324, "at least 1e-09"),
        ("lease_s", 1e300, "at most 316224000"),
        ("orphan_s", 1e300, "at most"),
        ("target_loss", 1e300, "at most 1e+38"),
        ("scaling_curve", {"1": 1e300}, "at most 1000000000"),
        ("scaling_curve", {str(2**62): 1.0}, "at most 1048576"),
        ("init_from", OVERLONG_NAME, "component of 300 bytes, and a file's name has 255 at most"),
        ("init_from", "a\0b", "NUL character at position 1: leave it out"),
        ("command.script", "a\0b", "NUL character"),
        ("command.script", "x/" * 5000, "may have 4096: shorten it"),
        ("command.python", "a\0b", "NUL character"),
        ("command.python", OVERLONG_NAME, "component of 300 bytes"),
        ("command.working_dir", "a\0b", "NUL character"),
        ("command.module", "a\0b", "NUL character"),
        ("command.args", ["a\0b"], "NUL character"),
        ("command.args", [LONG], "may have 131071"),
        ("command.args", ["x" * 100_000] * 20, "may have 1048576: put them into files"),
        ("command.env", {"A": "a\0b"}, "NUL character"),
        ("command.env", {"A=B": "c"}, "empty or holds '='"),
        ("secret_env", {"A": f"{SECRET}\0"}, "NUL character"),
        ("identity.dag_id", LONG, "has 1000000 characters, and may have 250: shorten it"),
        ("identity.dag_id", "a\0b", "NUL character"),
        ("identity.run_id", "a\0b", "NUL character"),
        ("identity.task_id", "a\ud800b", "half of a surrogate pair"),
        ("identity.map_index", 2**31, "at most 2147483647"),
        ("labels", {"a": "b\0"}, "NUL character"),
        ("progress_regex", LONG, "may have 4096"),
        ("progress_file", OVERLONG_NAME, "component of 300 bytes"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_submission_out_of_bounds_is_refused(path, value, said):
    """Also before it is sent: at DAG parse, and on the command line."""
    with pytest.raises(ValidationError) as refused:
        JobSubmission.model_validate(changed(SUBMISSION, path, value))
    (error,) = refused.value.errors()
    assert error["type"] == OUT_OF_BOUNDS
    assert said in error["msg"]
    where = ".".join(str(part) for part in error["loc"])
    named = path.rpartition(".")[2] if path != "length" else "epochs"
    assert where.startswith(path) or named in error["msg"]
    assert SECRET not in error["msg"]


@pytest.mark.parametrize(("pattern", "said"), [("step (", "is no regular expression"), ("step", "has no group")])
def test_a_pattern_that_finds_no_step_is_refused_when_it_is_submitted(pattern, said):
    with pytest.raises(ValidationError, match=rf"progress_regex {said}") as refused:
        JobSubmission.model_validate(changed(SUBMISSION, "progress_regex", pattern))
    assert f"{pattern!r} {said}" not in refused.value.errors()[0]["msg"], "a text may be a secret"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("deadline_at", MILLISECONDS, "deadline_at: 1800000000000 is no time between 1970 and 2100"),
        ("length.steps", 10**19, "length.steps: about 1e19 must be at most 2147483647: give less"),
        ("identity.dag_id", LONG, "identity.dag_id: has 1000000 characters, and may have 250: shorten it"),
        ("command.script", "a\0b", "command.script: has a NUL character at position 1: leave it out"),
        ("secret_env", {"A": f"{SECRET}\0"}, "secret_env.A: has a NUL character"),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_the_service_names_field_limit_and_remedy(world, http, path, value, said):
    raw = {**world.submission(within=600).model_dump(mode="json"), "secret_env": {"TOKEN": SECRET}}
    raw = changed(raw, path, value)
    answer = await http.put("/v1/jobs/some-job", json=raw)
    assert answer.status_code == 422, answer.text
    assert said in Problem.model_validate_json(answer.content).message
    assert SECRET not in answer.text
    assert len(answer.content) < 5000


async def test_other_calls_are_held_to_bounds(world, http):
    calls = [
        ("PATCH", "/v1/jobs/{job}", {"claim": 1, "deadline_at": MILLISECONDS}, "deadline_at"),
        ("PATCH", "/v1/jobs/{job}", {"claim": 1, "value": 1e300}, "value"),
        ("PATCH", "/v1/jobs/{job}", {"claim": 2**31}, "claim"),
        ("POST", "/v1/jobs/{job}/cancel", {"claim": 1, "reason": "a\0b"}, "reason"),
        ("POST", "/v1/jobs/{job}/cancel", {"claim": 1, "reason": LONG}, "reason"),
        ("POST", "/v1/jobs/{job}/attach", {"lease_s": 1e300}, "lease_s"),
        ("PUT", "/v1/nodes/node0/drain", {"until_at": MILLISECONDS}, "until_at"),
        ("GET", "/v1/jobs?dag_id=a%00b", None, "dag_id"),
        ("GET", "/v1/jobs?run_id=a%00b", None, "run_id"),
        ("GET", f"/v1/jobs?namespace={'x' * 300}", None, "namespace"),
        ("GET", "/v1/jobs?map_index=99999999999", None, "map_index"),
        ("GET", "/v1/jobs?state=a%00b", None, "state"),
        ("GET", "/v1/events?job_id=a%00b", None, "job_id"),
        ("PUT", "/v1/nodes/a%00b/drain", {"until_at": None}, "node_id"),
    ]
    job = world.submit(within=600, scaling_curve={1: 10.0})
    for method, path, body, field in calls:
        answer = await http.request(method, path.format(job=job.job.job_id), json=body)
        assert answer.status_code == 422, (path, answer.text)
        assert field in Problem.model_validate_json(answer.content).message
        assert len(answer.content) < 5000


async def test_a_number_that_is_not_finite_is_refused(world, http):
    for field in ("lease_s", "orphan_s", "value", "next_run_at", "target_loss"):
        raw = {**world.submission(within=600).model_dump(mode="json"), field: 12345.5}
        for number in ("NaN", "Infinity", "-Infinity", "1e999"):
            body = json.dumps(raw).replace("12345.5", number)
            headers = {"Content-Type": "application/json"}
            answer = await http.put("/v1/jobs/some-job", content=body, headers=headers)
            assert answer.status_code == 422
            assert field in Problem.model_validate_json(answer.content).message


async def test_a_script_that_is_too_long_only_with_its_folder_is_missing(world, http):
    raw = changed(world.submission(within=600).model_dump(mode="json"), "command.script", "x/" * 2040 + "train.py")
    job_id = JobIdentity.as_stored(raw["identity"]).job_id
    answer = await http.put(f"/v1/jobs/{job_id}", json=raw)
    assert (answer.status_code, answer.json()["error"]) == (422, "script_missing")


async def test_what_cannot_be_encoded_is_refused_like_anything_else(http):
    body = b'{"\\ud800": 1, "deadline_at": "\\udfff"}'
    answer = await http.put("/v1/jobs/some-job", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    Problem.model_validate_json(answer.content)


def test_the_limits_stand_in_the_schema():
    schema = JobSubmission.model_json_schema()
    deadline = schema["properties"]["deadline_at"]["anyOf"][0]
    assert deadline == {"type": "number", "minimum": 0.0, "maximum": bounds.LATEST_S}
    assert schema["$defs"]["Length"]["properties"]["steps"]["anyOf"][0]["maximum"] == bounds.MOST_COUNT
    assert schema["$defs"]["JobIdentity"]["properties"]["dag_id"]["maxLength"] == 250


def test_whole_numbers_in_a_query_are_what_a_column_holds():
    asked = [
        (f"{path}: {one['name']}", kind)
        for path, operations in document()["paths"].items()
        for operation in operations.values()
        for one in operation.get("parameters", ())
        for kind in (one["schema"], *one["schema"].get("anyOf", ()))
        if kind.get("type") == "integer" and one["name"] != "offset"  # into a file, not into the database
    ]
    assert len(asked) > 5
    assert [where for where, kind in asked if not kind.get("maximum", 1e99) <= bounds.MOST_COUNT] == []


@pytest.mark.postgres
async def test_an_event_that_nobody_can_have_seen_is_none_of_postgresql_s_troubles(make_world, postgres_url):
    world = make_world(url=postgres_url)
    job_id = world.submit(within=600, scaling_curve={1: 10.0}).job.job_id
    insight = insight_of(world)
    with world.store.write() as writer:
        row = writer.incarnation(job_id, 1)
        row.verdict = replace(row.verdict, event_id=2**40)
    async with asking(world) as http:
        for path in (f"/v1/jobs/{job_id}/events", "/v1/events"):
            assert (await http.get(path, params={"after": 2**31})).status_code == 422
            assert (await http.get(path, params={"after": -1})).status_code == 422
        assert (await http.get(f"/v1/jobs/{job_id}/events", params={"after": bounds.MOST_COUNT})).json() == []
    assert [one.job_id for one in insight.history(None, None, 4).admissions] == [job_id]


def test_an_answer_with_what_an_older_service_took_in_can_be_read(world):
    """A client of today lists the jobs of yesterday."""
    job = world.submit(within=600, scaling_curve={1: 10.0}).job
    raw = job.model_dump(mode="json")
    raw["identity"]["dag_id"] = "x" * 1000
    raw["deadline_at"] = MILLISECONDS
    read = TypeAdapter(type(job)).validate_json(json.dumps(raw))
    assert read.identity.dag_id == "x" * 1000
    assert read.identity.job_id.startswith("xxx")


NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([2**31, 2**63, 10**30, 1.8e12, 1e308, 5e-324]))
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(alphabet=st.characters(), max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=4,
)
PATHS = [
    *(name for name in JobSubmission.model_fields if name not in ("identity", "command", "length")),
    *(f"identity.{name}" for name in ("namespace", "dag_id", "run_id", "task_id", "map_index")),
    *(f"command.{name}" for name in ("script", "module", "args", "args_shown", "python", "working_dir", "env")),
    *(f"length.{name}" for name in ("steps", "epochs", "samples")),
]


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(PATHS), st.one_of(ANYTHING, NUMBERS), min_size=1, max_size=3))
async def test_any_json_in_any_field_never_is_a_defect_and_the_next_pass_works(world, http, changes):
    raw = world.submission(within=600, scaling_curve={1: 10.0}).model_dump(mode="json")
    for path, value in changes.items():
        raw = changed(raw, path, value)
    try:
        job_id = JobIdentity.model_validate(raw["identity"]).job_id
    except ValueError:
        job_id = "some-job"
    body = json.dumps(raw).encode()
    answer = await http.put(f"/v1/jobs/{job_id}", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, answer.text
    world.step(0.5)
    assert world.reconciler.problem == ""
    listed = await http.get("/v1/jobs")
    assert listed.status_code == 200


@pytest.mark.postgres
def test_what_is_just_within_bounds_can_be_stored_by_postgresql(make_world, postgres_url):
    """Ids and a script as long as they may be: each index has room for them, though nothing of it can be compressed."""
    world = make_world(url=postgres_url)
    script = "/".join([*(random_letters(250) for _ in range(4)), "train.py"])
    source = world.base / "source" / script
    source.parent.mkdir(parents=True)
    source.write_text("print('training')\n")
    sha256 = keep_folder(world, world.base / "source")
    raw = world.submission(within=900, scaling_curve={1: 10.0}).model_dump(mode="json")
    psi = "\N{GREEK SMALL LETTER PSI}"  # six bytes in JSON
    ids = {"namespace": "n", "dag_id": psi * 250, "task_id": random_letters(80), "run_id": "r" * 250}
    for name, value in ids.items():
        raw = changed(raw, f"identity.{name}", value)
    raw = changed(changed(raw, "command.snapshot", sha256), "command.script", script)
    submission = JobSubmission.model_validate(raw)
    job = world.attached(world.job_service.submit(submission.identity.job_id, submission))
    assert world.ended(job).state == "succeeded"
    with world.store.read() as reader:
        assert reader.history(submission.identity.recurring_key, world.row(job).signature) is not None


def keep_folder(world, folder) -> str:
    snapshot = snapshot_folder(folder)
    incoming = world.snapshots.incoming()
    incoming.write_bytes(snapshot.tar)
    world.snapshots.accept(snapshot.sha256, incoming)
    return snapshot.sha256


def random_letters(length: int) -> str:
    return "".join(random.Random(length).choices(string.ascii_letters + string.digits, k=length))


@pytest.mark.parametrize("ahead_years", [-50, 1, 9])
def test_a_deadline_may_be_long_ago_and_some_years_ahead(ahead_years):
    at = time.time() + ahead_years * 366 * 86400
    assert JobSubmission.model_validate(changed(SUBMISSION, "deadline_at", at)).deadline_at == at


def test_a_deadline_many_years_ahead_is_refused_and_a_stored_one_still_loads():
    raw = changed(SUBMISSION, "deadline_at", time.time() + 20 * 366 * 86400)
    with pytest.raises(ValidationError, match="is 20 years ahead, and may be 10: give UTC seconds of earlier"):
        JobSubmission.model_validate(raw)
    assert submission_out_of_bounds(StoredSubmission.as_stored(raw)) is None


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/jobs?limit=0", "limit: must be at least 1: give more"),
        ("/v1/jobs?limit=1001", "limit: must be at most 1000: give less"),
        ("/v1/jobs?limit=x", "limit: is no whole number: give one, in digits"),
        ("/v1/jobs?live=perhaps", "live: is neither true nor false: give one of the two"),
        ("/v1/jobs?state=x", "state: is none of those there are: give 'submitted', "),
        ("/v1/jobs/A%20B", "job_id: is no such name: give one of the form ^[a-z0-9]"),
        ("/v1/events?after=-1", "after: must be at least 0: give more"),
        ("/v1/unowned?silent_s=0", "silent_s: must be more than 0: give more"),
    ],
)
async def test_a_parameter_out_of_bounds_is_refused_with_field_limit_and_remedy(http, path, said):
    answer = await http.get(path)
    assert answer.status_code == 422
    assert said in Problem.model_validate_json(answer.content).message
    assert "Input should" not in answer.text


def test_limits_of_what_is_reported_say_what_to_do():
    assert "divide it" in str(bounds.loss_problem(1e39))
    assert "leave it out" in str(bounds.json_problem({"a": math.nan}))

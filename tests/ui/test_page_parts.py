"""Pieces of the page, each for itself: run by Node, with as much of a document as they need."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import elasticflow_airflow.ui
from elasticflow_airflow.times import duration

STATIC = Path(elasticflow_airflow.ui.__file__).parent / "static"
DASH = "\N{EN DASH}"
DOCUMENT = """
globalThis.Node = class {};
class Element extends Node {
  constructor() { super(); this.attributes = {}; this.children = []; this.style = { setProperty() {} }; }
  setAttribute(name, value) { this.attributes[name] = value; }
  append(...children) { this.children.push(...children); }
  get text() { return this.children.map((child) => child.text).join(''); }
}
class Text extends Node { constructor(text) { super(); this.text = text; } }
const make = () => new Element();
const nowhere = { addEventListener() {}, removeEventListener() {}, getItem: () => null, setItem() {}, matches: false };
globalThis.document = {
  ...nowhere, createElement: make, createElementNS: make, createTextNode: (text) => new Text(text),
  documentElement: make(), querySelector: () => null, baseURI: 'http://here/', body: make(),
};
globalThis.window = globalThis;
globalThis.matchMedia = () => nowhere;
globalThis.addEventListener = () => {};
for (const name of ['sessionStorage', 'localStorage']) globalThis[name] ??= nowhere;
globalThis.location ??= new URL('http://here/elasticflow/#/cluster');
"""


def call(module: str, expression: str, value: Any) -> Any:
    """What an expression over an export of a module of the page gives for ``value``."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node on this machine: apt-get install nodejs")
    script = f"""{DOCUMENT}
const page = await import({json.dumps((STATIC / module).as_uri())});
const value = {json.dumps(value)};
console.log(JSON.stringify(await {expression}));
"""
    done = subprocess.run(
        [node, "--input-type=module", "--eval", script], capture_output=True, text=True, check=False, timeout=60.0
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("status", "tile"),
    [
        ({"logical_workers": 8, "seed": 7, "consistency": "consistent"}, ["Logical workers", "8", "seed 7"]),
        ({"logical_workers": 8, "seed": 0, "consistency": "consistent"}, ["Logical workers", "8", "seed 0"]),
        (
            {"logical_workers": 4, "seed": None, "consistency": "consistent"},
            ["Logical workers", "4", "seed not known yet"],
        ),
        (
            {"logical_workers": None, "seed": 3, "consistency": "fast"},
            ["Logical workers", DASH, "seed 3, consistency fast"],
        ),
    ],
)
def test_what_decides_on_the_weights_is_shown_plainly(status: dict[str, Any], tile: list[str]) -> None:
    assert call("parts.js", "page.weightsTile(value)", status) == tile


def test_durations_are_written_as_the_service_writes_them() -> None:
    lengths = [0, 0.04, 0.3, 5, 9.94, 9.96, 42.4, 59.6, 368, 3599.3, 3599.7, 4500, 85000, 86385, 90061, 3e5, -90]
    written = [duration(length).replace("-", "\N{MINUS SIGN}") for length in lengths]
    assert call("format.js", "value.map(page.duration)", lengths) == written


def job(**changes: Any) -> dict[str, Any]:
    return {"state": "running", "deadline_at": time.time() + 3600, "slack_s": 1800.0, "at_risk": False} | changes


@pytest.mark.parametrize(
    ("changes", "tone", "text"),
    [
        ({}, "ok", "spare"),
        ({"slack_s": 100.0}, "warn", "spare"),
        ({"slack_s": -60.0}, "bad", "late"),
        ({"at_risk": True}, "bad", "At risk"),
        ({"slack_s": None}, "quiet", "Not known yet"),
        *(({"state": state}, "quiet", "spare") for state in ("submitted", "profiling", "waiting", "admitted")),
        *(({"state": state}, "quiet", DASH) for state in ("failed", "cancelled", "rejected")),
        ({"state": "succeeded", "result": {"met": True, "slack_s": 60.0}}, "ok", "early"),
        ({"state": "succeeded", "result": {"met": False, "slack_s": -60.0}}, "bad", "late"),
    ],
)
def test_slack_is_green_only_where_a_job_trains_or_was_in_time(changes: dict[str, Any], tone: str, text: str) -> None:
    chip = "{ const made = page.slackChip(value); return [made.attributes.class, made.text]; }"
    shown = call("parts.js", f"(() => {chip})()", job(**changes))
    assert shown[0] == f"chip {tone}"
    assert text in shown[1]


@pytest.mark.parametrize(
    ("forecast", "note", "tone"),
    [
        ({"value": None, "error": {}}, "1 job late or at risk now", "bad"),
        ({"value": None, "error": None}, "1 job late or at risk now", "bad"),
        ({"value": {"items": [{}, {}], "kept": 2, "not_kept": 0}, "error": None}, "1 job late or at risk now", "bad"),
    ],
)
def test_what_is_late_or_at_risk_now_is_said_whatever_the_forecast_says(
    forecast: dict[str, Any], note: str, tone: str
) -> None:
    jobs = [job(), job(at_risk=True), job(state="failed", slack_s=-60.0)]
    tile = call("views/cluster.js", "page.nextDay(value[0], value[1]).slice(2)", [{"jobs": jobs}, forecast])
    assert tile == [note, tone]


def test_where_nothing_is_late_a_missing_forecast_is_no_calm() -> None:
    jobs = {"jobs": [job()]}
    tile = call("views/cluster.js", "page.nextDay(value, { value: null, error: {} }).slice(1)", jobs)
    assert tile == [DASH, "the forecast did not come", "warn"]
    not_yet = call("views/cluster.js", "page.nextDay(value, { value: null, error: null }).slice(1)", jobs)
    assert not_yet == [DASH, "loading\N{HORIZONTAL ELLIPSIS}", None]


@pytest.mark.parametrize(
    ("changes", "tone", "text"),
    [
        ({}, "accent", "Running"),
        ({"slack_s": -1.0}, "bad", "Running, late"),
        ({"at_risk": True}, "bad", "Running, at risk"),
        ({"state": "waiting", "slack_s": -60.0}, "bad", "Waiting, late"),
        ({"state": "succeeded", "slack_s": -60.0}, "ok", "Succeeded"),
    ],
)
def test_a_job_that_is_late_looks_late(changes: dict[str, Any], tone: str, text: str) -> None:
    made = "(() => { const made = page.stateChip(value); return [made.attributes.class, made.text]; })()"
    shown = call("parts.js", made, job(**changes))
    assert shown[0] == f"chip {tone}"
    assert shown[1].endswith(text)


def test_a_long_name_loses_its_middle() -> None:
    names = ["train", "x" * 22, "recommender_before_the_morning_peak_of_the_week"]
    short = call("format.js", "value.map((name) => page.middle(name, 22))", names)
    assert short == ["train", "x" * 22, "recommender\N{HORIZONTAL ELLIPSIS}f_the_week"]


FEED = """(async () => {
  const told = [];
  const answers = [];
  let asked = 0;
  const ask = (signal) => new Promise((ready, failed) => {
    asked += 1;
    signal.addEventListener('abort', () => failed(Object.assign(new Error('aborted'), { name: 'AbortError' })));
    answers.push({ ready, failed });
  });
  const feed = new page.Feed(ask, 0, () => told.push([feed.value, feed.error?.message ?? null]), 40);
  const turn = () => new Promise((done) => setTimeout(done, 5));
  %s
  return { told, asked };
})()"""


def play(steps: str) -> Any:
    """What a feed told, and how often it asked, in some steps."""
    return call("feed.js", FEED % steps, None)


def test_a_part_is_asked_for_once_at_a_time_and_keeps_its_answer_when_the_next_one_fails() -> None:
    done = play(
        "feed.tick(); feed.tick(); answers[0].ready('first'); await turn(); feed.tick();"
        " answers[1].failed(new Error('busy')); await turn();"
    )
    assert done == {"told": [["first", None], ["first", "busy"]], "asked": 2}


def test_a_part_that_does_not_answer_is_given_up_and_asked_again_when_somebody_wants_it() -> None:
    done = play(
        "feed.tick(); await new Promise((done) => setTimeout(done, 80)); feed.again(); answers[1].ready('late');"
        " await turn();"
    )
    assert done == {"told": [[None, "no answer within 0 s"], ["late", None]], "asked": 2}


def test_an_answer_to_a_question_that_was_dropped_is_not_shown() -> None:
    done = play("feed.tick(); feed.again(); answers[0].ready('old'); answers[1].ready('new'); await turn();")
    assert done == {"told": [["new", None]], "asked": 2}


def leadership(**changes: Any) -> dict[str, Any]:
    replicas = [
        {"name": "ef-0", "silent_s": 1.0, "is_gone": False},
        {"name": "ef-1", "silent_s": 95.0, "is_gone": True},
    ]
    known = {"epoch": 7, "leader": "ef-0", "elected_at": time.time(), "change": "hand-over", "failed_over_at": None}
    if changes.get("change") == "fail-over":
        known["failed_over_at"] = known[
            "elected_at"
        ]  # just now, and not at the collection of the tests: the day before?
    return {**known, "replicas": replicas, **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, r"ef-0 decides since \d\d:\d\d, by a hand-over \(epoch 7\)[.] .* No fail-over so far[.]"),
        ({"leader": None}, r"No replica decides at this moment \(epoch 7\)[.] .*"),
        (
            {"change": "fail-over"},
            r"ef-0 decides since \d\d:\d\d, by a fail-over .* Last fail-over: \d\d:\d\d[.]",
        ),
        ({}, r".* Replicas: ef-0, ef-1 \(not heard of for 1 min 35 s\)[.] .*"),
    ],
)
def test_the_page_says_which_replica_decides(changes: dict[str, Any], said: str) -> None:
    assert re.fullmatch(said, call("views/cluster.js", "page.whoDecides(value)", leadership(**changes)))

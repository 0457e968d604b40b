"""Who holds the others up, told from what the workers write; and which of those who live go on together."""

from __future__ import annotations

import json
import random

import pytest

from elasticflow_airflow.engines.job_files import Heartbeat, JobFolders
from elasticflow_airflow.runtime.protocol import heartbeat_path, write_json_atomic
from elasticflow_airflow.service.loop.rescaling import survivors
from elasticflow_airflow.service.loop.watching import find_hung


def beat(phase: str, at_s: float = 1000.0) -> Heartbeat:
    return Heartbeat(step=7, phase=phase, at_s=at_s)


@pytest.mark.parametrize(
    ("beats", "hung"),
    [
        ({"a": beat("wait"), "b": beat("compute", 960.0)}, {"b"}),  # silent for 40 s
        ({"a": beat("reduce"), "b": beat("reduce", 960.0)}, {"b"}),
        ({"a": beat("wait"), "b": beat("compute", 980.0)}, set()),  # not silent for long enough
        ({"a": beat("compute"), "b": beat("compute", 960.0)}, set()),  # nobody waits for it
        ({"a": beat("wait"), "b": beat("wait", 999.0)}, set()),  # both wait, and say so
        ({"a": beat("wait"), "b": None}, set()),  # a missing file says nothing
        ({"a": None, "b": None}, set()),
        ({"a": beat("wait", 500.0), "b": beat("wait", 501.0)}, set()),  # the whole machine slept
        ({"a": beat("wait")}, set()),
        ({"a": beat("wait"), "b": beat("compute", 1.0), "c": beat("wait", 2.0)}, {"b", "c"}),
        ({"a": beat("wait"), "b": beat("compute")}, set()),  # it computes, and may well be done soon
    ],
)
def test_who_is_silent_while_others_wait(beats, hung):
    assert find_hung(beats, limit_s=30.0, only_silent=True) == hung


@pytest.mark.parametrize(
    ("beats", "hung"),
    [
        ({"a": beat("wait"), "b": beat("compute")}, {"b"}),
        ({"a": beat("wait"), "b": beat("reduce"), "c": beat("compute")}, {"c"}),
        ({"a": beat("compute"), "b": beat("compute")}, set()),
        ({"a": beat("wait"), "b": beat("wait")}, set()),
        ({"a": beat("wait"), "b": beat("compute"), "c": None}, set()),
    ],
)
def test_who_computes_what_the_others_have_computed_long_ago(beats, hung):
    assert find_hung(beats, limit_s=30.0, only_silent=False) == hung


def test_a_file_that_cannot_be_read_says_nothing(tmp_path):
    files = JobFolders(tmp_path)
    path = heartbeat_path(files.folder("job", 1), "g000001-r000")
    assert files.heartbeat("job", 1, "g000001-r000") is None
    write_json_atomic(path, {"step": 3, "phase": "reduce", "at_s": 1000.5})
    assert files.heartbeat("job", 1, "g000001-r000") == Heartbeat(3, "reduce", 1000.5)
    for text in ("", "{", "[]", json.dumps({"step": 3}), json.dumps({"step": "x", "phase": "wait", "at_s": 1})):
        path.write_text(text)
        assert files.heartbeat("job", 1, "g000001-r000") is None


def slots(*indices: int) -> list[list[object]]:
    return [["n", index] for index in indices]


@pytest.mark.parametrize(
    ("placement", "living", "go_on"),
    [
        ((0, 1), (1,), (1,)),
        ((0, 1, 2, 3), (0, 2, 3), (2, 3)),  # a half that is whole
        ((0, 1, 2, 3), (0, 1, 3), (0, 1)),
        ((0, 1, 2, 3), (0, 3), (0, 3)),  # no half is
        ((2, 3, 0, 1), (2, 0, 1), (0, 1)),
        ((0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 4, 5, 6, 7), (4, 5, 6, 7)),
    ],
)
def test_the_largest_part_that_was_together_goes_on(placement, living, go_on):
    assert survivors(slots(*placement), slots(*living)) == slots(*go_on)


def test_survivors_are_always_a_power_of_two_of_those_who_live():
    chance = random.Random(0)
    for _ in range(500):
        size = 1 << chance.randint(0, 4)
        placement = slots(*chance.sample(range(40), size))
        living = [slot for slot in placement if chance.random() < 0.7] or placement[:1]
        chosen = survivors(placement, living)
        assert all(slot in living for slot in chosen)
        assert len(chosen) & (len(chosen) - 1) == 0
        assert len(chosen) * 2 > len(living)

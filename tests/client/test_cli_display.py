"""What the command line shows of a target loss and of slots that are avoided."""

from __future__ import annotations

import pytest

from elasticflow_airflow.api import Health, JobIdentity, JobStatus, LeaderStatus, ReplicaStatus, SlotStatus, Verdict
from elasticflow_airflow.cli.terminal.display import health_lines, job_lines
from elasticflow_airflow.times import local_moment


def status(**given):
    values = {
        "job_id": "j",
        "identity": JobIdentity(dag_id="d", run_id="r", task_id="t"),
        "incarnation": 1,
        "generation": 1,
        "state": "running",
        "verdict": Verdict(decision="best_effort"),
        "claim": 1,
        "submitted_at": 0.0,
        "deadline_at": None,
        "best_effort": True,
        "value": 1.0,
        "total_steps": 2000,
    }
    return JobStatus(**{**values, **given})


@pytest.mark.parametrize(
    ("known", "line"),
    [
        ({"smoothed_loss": 1.2}, "loss 0.35, smoothed loss 1.2: not foreseeable yet, at most 2000 steps"),
        (
            {"smoothed_loss": 0.5, "expected_steps": 812, "expected_steps_at_most": 950},
            "loss 0.35, smoothed loss 0.5: expected at step 812, with its error 950, at most 2000",
        ),
        ({"smoothed_loss": 0.349, "target_reached": True}, "loss 0.35, smoothed loss 0.349: reached"),
        ({"smoothed_loss": 0.41, "target_reached": False}, "loss 0.35, smoothed loss 0.41: not reached"),
    ],
)
def test_a_job_with_a_target_says_how_it_stands(known, line):
    assert f"target      {line}" in job_lines(status(target_loss=0.35, **known))


def test_a_job_without_a_target_says_nothing_of_it():
    assert not [line for line in job_lines(status()) if line.startswith("target")]


@pytest.mark.parametrize(
    ("known", "shares", "seed"),
    [
        ({"logical_workers": 8, "seed": 0}, "8 logical workers", "0"),
        ({"logical_workers": 4}, "4 logical workers", "not known yet"),
        ({"consistency": "fast", "seed": 7}, "one for each worker (consistency fast)", "7"),
    ],
)
def test_what_decides_on_the_weights_has_fields_of_its_own(known, shares, seed):
    lines = job_lines(status(**known))
    assert f"shares      {shares}" in lines
    assert f"seed        {seed}" in lines


def test_an_avoided_slot_says_until_when():
    health = Health(
        status="ok",
        version="1",
        engine="fake",
        pid=1,
        started_at=0.0,
        state_dir="s",
        live_jobs=0,
        slots=[SlotStatus(node_id="n", index=0), SlotStatus(node_id="n", index=1, avoided_until=700.0)],
    )
    assert health_lines(health)[2:] == [
        "  n  0 of 2 slots in use",
        f"    n:1 avoided until {local_moment(700.0)}: a worker was slow",
    ]


def test_a_node_is_one_line_with_the_holders_of_its_slots():
    slots = [
        *(SlotStatus(node_id="a", index=index, job_id="daily-train-1") for index in range(3)),
        SlotStatus(node_id="a", index=3, busy="another service"),
        SlotStatus(node_id="b", index=0, draining_until=700.0),
    ]
    health = Health(
        status="ok", version="1", engine="fake", pid=1, started_at=0.0, state_dir="s", live_jobs=1, slots=slots
    )
    assert health_lines(health)[2:] == [
        "  a  4 of 4 slots in use: daily-train-1 (3), busy: another service (1)",
        f"  b  0 of 1 slots in use; the node goes away at {local_moment(700.0)}",
    ]


def healthy(role, **leadership):
    replicas = [
        ReplicaStatus(
            replica_id="a1", role="leader", url="http://10.0.0.5:8321", host="ef-0", version="1", silent_s=1.0
        ),
        ReplicaStatus(replica_id="b2", role="follower", host="ef-1", version="1", silent_s=95.0, is_gone=True),
        ReplicaStatus(replica_id="c3", role="follower", silent_s=19.0),
    ]
    known = {"epoch": 7, "leader": "a1", "elected_at": 700.0, "change": "hand-over", "replicas": replicas}
    return Health(
        status="ok",
        version="1",
        engine="cluster",
        pid=1,
        started_at=0.0,
        state_dir="s",
        live_jobs=0,
        role=role,
        leadership=LeaderStatus(**known | leadership),
    )


def test_replicas_say_who_decides_since_when_and_who_is_missing():
    assert health_lines(healthy("leader"))[2:] == [
        f"role the leader of epoch 7, since {local_moment(700.0)}, by a hand-over; no fail-over so far",
        "  replica a1 on ef-0 at http://10.0.0.5:8321, elasticflow 1: leader",
        "  replica b2 on ef-1, elasticflow 1: follower; not heard of for 1 min 35 s",
        "  replica c3: follower",
    ]


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"leader": None}, "role follower; no replica decides at this moment (epoch 7); no fail-over so far"),
        (
            {"change": "fail-over", "failed_over_at": 700.0},
            (
                f"role follower; the leader of epoch 7 is a1, since {local_moment(700.0)}, by a fail-over;"
                f" last fail-over {local_moment(700.0)}"
            ),
        ),
    ],
)
def test_a_follower_that_had_to_answer_itself_says_so(known, said):
    assert health_lines(healthy("follower", **known))[2] == said


def test_a_service_that_is_alone_has_no_role():
    assert not any("role" in line for line in health_lines(healthy("leader").model_copy(update={"leadership": None})))

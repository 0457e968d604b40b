"""Documents in columns: what was stored before types reads the same, and what cannot be read hurts nobody else."""

from __future__ import annotations

import pytest

from elasticflow_airflow.scheduler_core.convergence import LossCurve
from elasticflow_airflow.service.store.documents.columns import Document, Unreadable, UnreadableError
from elasticflow_airflow.service.store.documents.generation_notes import Finished, GenerationNotes, OutOfMemory, Switch
from elasticflow_airflow.service.store.documents.job_documents import Ending, LossTarget
from elasticflow_airflow.service.store.tables import IncarnationRow

STORED_BEFORE = {
    "ordered_at_step": 10,
    "own": True,
    "threads": 2,
    "in_place": False,
    "stopped": 12,
    "finished": {"path": "final", "early": ""},
    "out_of_memory": {"micro_batch_size": 8, "message": "no room"},
    "switch": {"at_s": 1.8e9, "pause_s": 0.004, "state_bytes": 8.0},
    "windows": {"g1-r0": [0.1, 0.2]},
    "slow": {"g1-r0": 1.8e9},
    "absent": ["g1-r1"],
    "message": "ValueError: x",
    "kind": None,
    "rank": 0,
    "micro_batch_size": 8,
}


def test_notes_that_were_stored_before_they_had_types_are_read():
    notes = Document(GenerationNotes).from_json(STORED_BEFORE)
    assert notes == GenerationNotes(
        ordered_at_step=10,
        own=True,
        threads=2,
        in_place=False,
        finished=Finished("final", ""),
        out_of_memory=OutOfMemory(8, "no room"),
        switch=Switch(1.8e9, 0.004, 8.0),
        windows={"g1-r0": [0.1, 0.2]},
        slow={"g1-r0": 1.8e9},
        absent=("g1-r1",),
        message="ValueError: x",
    )


@pytest.mark.parametrize("notes", [GenerationNotes(), GenerationNotes(finished=Finished(), measured=True, threads=0)])
def test_what_is_as_by_default_is_not_stored(notes):
    column = Document(GenerationNotes)
    stored = column.to_json(notes)
    assert stored == ({} if notes == GenerationNotes() else {"finished": {}, "measured": True, "threads": 0})
    assert column.from_json(stored) == notes


@pytest.mark.parametrize("stored", [[], 3, "notes", {"finished": "yes"}, {"threads": {}}, {"windows": [1]}])
def test_what_cannot_be_read_says_so_when_it_is_looked_into_and_is_kept(stored):
    column = Document(GenerationNotes)
    read = column.from_json(stored)
    assert isinstance(read, Unreadable)
    with pytest.raises(UnreadableError, match="threads cannot be read"):
        _ = read.threads
    assert column.to_json(read) == stored


def test_of_several_workers_the_longest_pause_counts_and_the_first_failure():
    assert Switch().at_least(5.0, 0.1, None).at_least(4.0, 0.2, 8.0) == Switch(5.0, 0.2, 8.0)
    first = GenerationNotes().failed("ValueError: x", None)
    assert first.failed("lost its peer", "peer") == GenerationNotes(message="ValueError: x", kind="peer")


LOSSES = {"width": 10.0, "losses": [3.0, 2.0]}


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ({}, None),
        ({"loss": 1.0}, LossTarget(loss=1.0)),
        (
            {"loss": 1.0, "smoothed": 2.0, "step": 80, "at_most": 95, "told": None, "curve": LOSSES, "earlier": LOSSES},
            LossTarget(
                loss=1.0,
                smoothed=2.0,
                step=80,
                at_most=95,
                curve=LossCurve(10.0, (3.0, 2.0)),
                earlier=LossCurve(10.0, (3.0, 2.0)),
            ),
        ),
    ],
)
def test_a_target_that_was_stored_before_is_read_and_none_is_an_empty_one(stored, read):
    column = IncarnationRow.__table__.c.target.type
    assert column.from_json(stored) == read
    assert column.from_json(column.to_json(read)) == read
    assert column.to_json(None) == {}


def test_an_end_is_one_in_which_a_job_is_over():
    column = Document(Ending)
    stored = {"state": "succeeded", "reason": "done", "failure": None, "use_checkpoint": False}
    assert column.from_json(stored).is_done
    assert "no state in which a job is over" in column.from_json({**stored, "state": "running"}).problem

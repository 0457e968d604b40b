"""Progress that two workers report of one generation: the one that was rank 0, and the one that is it next."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elasticflow_airflow.runtime.protocol import Report, ReportKind
from elasticflow_airflow.service.loop import observing
from elasticflow_airflow.service.store.documents.generation_notes import GenerationNotes
from elasticflow_airflow.service.store.documents.job_documents import Sampling
from elasticflow_airflow.service.store.documents.speed_measurement import Enough, SpeedMeasurement


@pytest.fixture
def fold():
    """Fold in progress of a worker; returns the failure, if there was one."""
    ended: list[str] = []
    enough = Enough(skip_steps=2, steps=10, seconds=1.0)
    context = SimpleNamespace(
        now=1e9, enough=enough, samples=[], end=lambda row, state, reason, failure: ended.append(str(reason))
    )
    row = SimpleNamespace(step=0, loss=None, steps_per_s=None, ever_reported=False, last_step_at=None, target=None)
    row.job_id, row.incarnation, row.sampling = "job", 1, Sampling()
    generation = SimpleNamespace(
        last_step=None,
        last_step_at=None,
        first_step=None,
        window=SpeedMeasurement(),
        notes=GenerationNotes(),
        workers=1,
    )

    def say(worker_id: str, step: int) -> str | None:
        data = {"window_steps": 1, "window_s": 0.1, "loss": 1.0}
        report = Report(
            kind=ReportKind.PROGRESS, generation=1, worker_id=worker_id, rank=0, step=step, at_s=step, data=data
        )
        observing._progress(context, row, generation, report)
        assert ended or row.step == generation.last_step
        return ended[-1] if ended else None

    say.row = row
    return say


def test_the_first_rank_0_is_heard_after_the_next_one(fold):
    """Each has a file of its own: a look may find the end of one, and a later look what came before in the other."""
    assert fold("a", 40) is None
    assert fold("b", 50) is None
    assert fold("a", 48) is None
    assert fold.row.step == 50


def test_one_worker_that_goes_backwards_fails(fold):
    fold("a", 40)
    fold("b", 50)
    assert "went backwards, from step 50 to 49" in fold("b", 49)

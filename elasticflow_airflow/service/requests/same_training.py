"""Whether a submission asks for a training that there is already: then it continues that one, or resumes from it.

What a retry of an Airflow task does with the success of an earlier attempt is decided in ``task/submitting.py``.
"""

from __future__ import annotations

from elasticflow_airflow.api import JobSubmission, State
from elasticflow_airflow.service.job_files.snapshots import SHA256
from elasticflow_airflow.service.store.documents.columns import readable
from elasticflow_airflow.service.store.documents.submission import StoredSubmission
from elasticflow_airflow.service.store.tables import IncarnationRow


def is_attachable(row: IncarnationRow, asked: StoredSubmission, submission: JobSubmission) -> bool:
    """Whether an attempt continues this incarnation: it is equal, and live or an unacknowledged success."""
    if not _same_training(row, asked, submission) or row.cancel_reason is not None:
        return False
    if row.terminal:
        return row.state == State.SUCCEEDED and not row.acknowledged
    if not row.ending:
        return True
    ending = readable(row.ending)
    return ending is not None and ending.state is State.SUCCEEDED


def is_resumable(row: IncarnationRow, asked: StoredSubmission, submission: JobSubmission) -> bool:
    """Whether a new incarnation resumes from the progress of this one."""
    return row.state != State.SUCCEEDED and _same_training(row, asked, submission)


def _same_training(row: IncarnationRow, asked: StoredSubmission, submission: JobSubmission) -> bool:
    """Whether a submission asks for the training of an incarnation. ``logical_workers=None`` matches any number."""
    if row.equality_key != submission.equality_key() or asked.consistency != submission.consistency:
        return False
    if not SHA256.match(asked.command.snapshot):
        return False  # Its code cannot be found.
    logical_workers = row.logical_workers or asked.logical_workers
    return submission.logical_workers is None or logical_workers in (None, submission.logical_workers)

"""The document that stores the submission of a job."""

from __future__ import annotations

from typing import Any, Self, cast

from elasticflow_airflow.api import JobSubmission


class StoredSubmission(JobSubmission):
    """A submission as it is stored: only the names of its secret environment variables, not their values."""

    secret_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, submission: JobSubmission) -> Self:
        """Return the stored form of a submission."""
        said: dict[str, Any] = {
            **dict(submission),
            "secret_env": {},
            "secret_names": tuple(sorted(submission.secret_env)),
        }
        return cast("Self", cls.model_construct(**said))

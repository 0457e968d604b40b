"""The document that says what was asked for of a job."""

from __future__ import annotations

from typing import Self

from elasticflow_airflow.api import JobSubmission


class StoredSubmission(JobSubmission):
    """A submission as it is stored: of the secrets of its environment only the names."""

    secret_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, submission: JobSubmission) -> Self:
        """What is stored of a submission."""
        said = {**dict(submission), "secret_env": {}, "secret_names": tuple(sorted(submission.secret_env))}
        return cls.model_construct(**said)

"""The ways in which an elastic task can fail, as types that retry policies and callbacks can distinguish.

Failures that a retry cannot fix are AirflowFailExceptions: Airflow then fails the task without a retry, whatever its
retry policy is.
"""

from __future__ import annotations

from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowNotFoundException

from elasticflow_airflow.client import ElasticFlowError, IncompatibleService, ServiceUnavailable, Unauthorized
from elasticflow_airflow.times import duration


class JobRejected(AirflowFailException):
    """The deadline cannot be promised; the message names the earliest deadline that could be."""


class JobCancelled(AirflowFailException):
    """The job was cancelled."""


class JobTakenOver(AirflowFailException):
    """A newer attempt of the same task has attached to the job: this one stops."""


class JobFailed(AirflowException):
    """The training failed at ``step``. A retry resumes from its last valid checkpoint."""

    def __init__(self, message: str, *, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


class ServiceAway(AirflowException):
    """The service did not answer for too long. A retry attaches to the same job, which keeps training meanwhile."""


class ServiceRefused(AirflowFailException):
    """The service answers but refuses this client: a wrong token, another version, or another program on that port."""


class UnusableConnection(AirflowFailException):
    """The Airflow connection is unusable: wrong type, invalid address or invalid extra."""


class MissingConnection(UnusableConnection, AirflowNotFoundException):
    """The Airflow connection does not exist."""


def as_task_error(error: ElasticFlowError) -> AirflowException:
    """Convert a client error into the exception that the task raises."""
    if isinstance(error, ServiceUnavailable):
        return ServiceAway(str(error))
    if isinstance(error, (Unauthorized, IncompatibleService)):
        return ServiceRefused(str(error))
    return AirflowException(str(error))


def after_waiting(error: ElasticFlowError | AirflowException, away_s: float) -> AirflowException:
    """Build the exception for a task that stopped waiting for the service after ``away_s`` seconds."""
    why = f"{error}; it has been away for {duration(away_s)}"
    refused = isinstance(error, (Unauthorized, IncompatibleService, AirflowFailException))
    return ServiceRefused(why) if refused else ServiceAway(why)

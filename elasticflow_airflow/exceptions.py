"""How an elastic task can fail, as types: for retry policies and callbacks to tell one end from another.

Those that another try cannot help are AirflowFailExceptions: Airflow then fails the task without a retry, whatever
its retry policy is.
"""

from __future__ import annotations

from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowNotFoundException

from elasticflow_airflow.client import ElasticFlowError, IncompatibleService, ServiceUnavailable, Unauthorized
from elasticflow_airflow.times import duration


class JobRejected(AirflowFailException):
    """The deadline cannot be promised; the message names the earliest that could be."""


class JobCancelled(AirflowFailException):
    """Somebody cancelled the job."""


class JobTakenOver(AirflowFailException):
    """A newer attempt of the same task has attached to the job: this one stops."""


class JobFailed(AirflowException):
    """The training failed at ``step``. A retry resumes from its last valid checkpoint."""

    def __init__(self, message: str, *, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


class ServiceAway(AirflowException):
    """The service did not answer for too long. A retry attaches to the same job, which trains on meanwhile."""


class ServiceRefused(AirflowFailException):
    """The service answers, but not to us: a wrong token, another version, or another program on that port."""


class UnusableConnection(AirflowFailException):
    """The Airflow connection says what cannot be used: another type, an address that is none, a wrong extra."""


class MissingConnection(UnusableConnection, AirflowNotFoundException):
    """There is no such Airflow connection."""


def as_task_error(error: ElasticFlowError) -> AirflowException:
    """Say as an exception of a task what a call of the service came to."""
    if isinstance(error, ServiceUnavailable):
        return ServiceAway(str(error))
    if isinstance(error, (Unauthorized, IncompatibleService)):
        return ServiceRefused(str(error))
    return AirflowException(str(error))


def after_waiting(error: ElasticFlowError | AirflowException, away_s: float) -> AirflowException:
    """Say as an exception of a task why a wait for the service was given up after so many seconds."""
    why = f"{error}; it has been away for {duration(away_s)}"
    refused = isinstance(error, (Unauthorized, IncompatibleService, AirflowFailException))
    return ServiceRefused(why) if refused else ServiceAway(why)

"""The route about what workers print. Secrets are hidden (``log_pieces.py``)."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import FastAPI, Query

from elasticflow_airflow.api import LogPiece
from elasticflow_airflow.engines.port import EngineError
from elasticflow_airflow.service.http.lanes import Lanes
from elasticflow_airflow.service.http.parameters import ByteOffset, Incarnation, JobId, LogName
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.job_files.log_pieces import read_piece
from elasticflow_airflow.service.refusal import Refusal, declared, no_such_job
from elasticflow_airflow.service.secrets import hidden_values
from elasticflow_airflow.service.store.tables import IncarnationRow
from elasticflow_airflow.service.store.views import UNREADABLE


def add_logs(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    """Add the routes."""

    @app.get("/v1/jobs/{job_id}/logs/{log_name}", responses=declared(404))
    @lanes.reading
    def log(
        job_id: JobId,
        log_name: LogName,
        offset: ByteOffset = 0,
        limit: Annotated[int, Query(ge=1, le=1 << 20)] = 1 << 16,
        incarnation: Incarnation | None = None,
    ) -> LogPiece:
        """A part of a worker's log from byte `offset`, at most `limit` bytes. The next part begins at `next_offset`.

        Secrets are shown as `***`. Values of `secret_env` are deleted when the job ends: what the script printed of
        them can then no longer be recognized.
        """
        with parts.store.read() as reader:
            job = reader.job(job_id)
            if job is None:
                raise no_such_job(job_id)
            of = incarnation or job.incarnation
            row = reader.incarnation(job_id, of)
        secrets = {} if row is None else _secrets_of(parts, row)
        try:
            return read_piece(partial(parts.engine().read_log, job_id, of, log_name), offset, limit, secrets.values())
        except EngineError as error:
            raise Refusal(503, "log_not_readable", str(error), "ask again in a moment") from error
        except KeyError as error:
            raise Refusal(
                404, "log_not_found", f"job {job_id} has no log {log_name!r}", "its status lists log_names"
            ) from error


def _secrets_of(parts: ServiceParts, row: IncarnationRow) -> dict[str, str]:
    try:
        return hidden_values(parts.job_service.secrets, row.submission, row.secret_env)
    except UNREADABLE as error:
        raise Refusal(
            503,
            "log_not_readable",
            f"what is secret in the log of job {row.job_id} cannot be told: its stored submission cannot be read",
            "read the file in the state directory, or cancel the job and submit it again",
        ) from error

"""The types of path and query parameters, each with its limits."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Path, Query
from pydantic import Field

from elasticflow_airflow import bounds
from elasticflow_airflow.api import IDEMPOTENCY_HEADER
from elasticflow_airflow.api.fields import Name

_JOB_ID = r"^[a-z0-9][a-z0-9-]{0,119}$"
_SOME = Field(min_length=1)

JobId = Annotated[str, Path(pattern=_JOB_ID)]
OneJob = Annotated[str, Query(pattern=_JOB_ID)]
IdempotencyKey = Annotated[str | None, Header(alias=IDEMPOTENCY_HEADER, pattern=r"^[A-Za-z0-9_-]{8,64}$")]
Sha256 = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$")]
NodeId = Annotated[Name, _SOME, Path()]
LogName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,119}$")]
EventId = Annotated[int, Query(ge=0, le=bounds.MOST_COUNT)]
ByteOffset = Annotated[int, Query(ge=0, lt=1 << 62)]
Incarnation = Annotated[int, Query(ge=1, le=bounds.MOST_COUNT)]
MapIndex = Annotated[int, Query(ge=-1, le=bounds.MOST_COUNT)]
SearchText = Annotated[str, Query(max_length=bounds.NAME_CHARACTERS, pattern=bounds.SEARCH_PATTERN)]
Names = Annotated[list[Name] | None, Query(max_length=1000)]
Hours = Annotated[float, Query(gt=0, le=24 * 14, allow_inf_nan=False)]
Moment = Annotated[float, Query(ge=bounds.EARLIEST_S, le=bounds.LATEST_S, allow_inf_nan=False)]

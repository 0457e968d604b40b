"""What is written into columns as it is, past the types of the documents that they hold."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import sqlalchemy as sa

from elasticflow_airflow.service.store.documents.columns import Document


def holds_json(column: sa.Column[Any]) -> bool:
    """Whether a column takes any JSON, as the database sees it."""
    return isinstance(column.type, sa.JSON | Document)


def as_stored(table: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Values for an update or insert that are stored as they are."""
    types = {name: table.__table__.columns[name].type for name in values}
    return {
        name: sa.bindparam(None, value, type_=sa.JSON(none_as_null=True))
        if isinstance(types[name], Document)
        else value
        for name, value in values.items()
    }


def check_numbers(engine: sa.Engine, table: Any, job_id: str) -> None:
    """Raise ValueError if there is a number in the stored rows of a job that JSON does not know. On SQLite."""
    columns = [sa.type_coerce(c, sa.Text) if holds_json(c) else c for c in table.__table__.columns]
    with engine.connect() as connection:
        rows = connection.execute(sa.select(*columns).where(table.job_id == job_id)).all()
    for row in rows:
        for column, value in zip(table.__table__.columns, row, strict=True):
            if holds_json(column) and value is not None:
                json.loads(value, parse_constant=_refuse)
            elif isinstance(value, float) and not math.isfinite(value):
                _refuse(f"{column.name}={value}")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"stored is {constant}")

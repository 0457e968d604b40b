"""What is written into columns as it is, past the types of the documents that they hold."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from elasticflow_airflow.service.documents import Document


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

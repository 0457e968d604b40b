"""Checks that values can be stored in every supported database. Pure functions.

Called before anything is written: a value that one column refuses makes the whole transaction fail, and PostgreSQL
refuses values that SQLite accepts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from elasticflow_airflow.service.store.documents.columns import Document, ReasonText
from elasticflow_airflow.service.store.documents.scheduler_values import StoredState
from elasticflow_airflow.service.store.tables import Base

_LONGEST_JSON = 8 * 2**20
"""In characters; anything longer is a file, not a value of a job."""
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
_NUL_IN_JSON = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def check_storable(kind: type[Base], values: Mapping[str, Any]) -> None:
    """Check values against their columns. Raises ValueError with table, column and limit for one that does not fit."""
    columns = kind.__table__.columns
    for name, value in values.items():
        if value is None:
            continue
        try:
            _check(columns[name].type, value)
        except ValueError as error:
            raise ValueError(f"{kind.__tablename__}.{name} {error}") from error


def _check(column: sa.types.TypeEngine[Any], value: Any) -> None:
    if isinstance(value, StoredState):
        _check_json_text(value.text)
    elif isinstance(column, Document):
        _check_json(column.to_json(value))
    elif isinstance(column, ReasonText):
        _check_text(str(value))
    elif isinstance(column, sa.JSON):
        _check_json(value)
    elif isinstance(column, sa.String):
        _check_text(value)
        if column.length is not None and len(value) > column.length:
            raise ValueError(f"holds at most {column.length} characters, and would get {len(value)}")
    elif isinstance(column, sa.Integer) and not isinstance(value, bool):
        bits = 63 if isinstance(column, sa.BigInteger) else 31
        if not -(1 << bits) <= value < 1 << bits:
            raise ValueError(f"holds integers below 2**{bits}, and would get one of {int(value).bit_length()} bits")
    elif isinstance(column, sa.Float) and math.isnan(value):
        raise ValueError("would get what is not a number")


def _check_text(value: str) -> None:
    if "\0" in value:
        raise ValueError("would get a text with a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("would get a text with half a surrogate pair") from error


def _check_json(value: Any) -> None:
    try:
        text = _ENCODER.encode(value)
    except RecursionError as error:
        raise ValueError("would get a value that is nested too deeply") from error
    except TypeError as error:
        raise ValueError(f"would get a value that is no JSON ({error})") from error
    except ValueError as error:
        raise ValueError("would get a number that is not finite") from error
    _check_json_text(text)


def _check_json_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("would get a text with half a surrogate pair") from error
    if len(text) > _LONGEST_JSON:
        raise ValueError(f"holds at most {_LONGEST_JSON} characters, and would get {len(text)}")
    if "\\u0000" in text and _NUL_IN_JSON.search(text):
        raise ValueError("would get a text with a NUL character")

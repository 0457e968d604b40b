"""What all messages are made from, and how an error is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

API_VERSION = "v1"
TRACEPARENT = "traceparent"
"""Label of a submission: where the job belongs in a trace (W3C Trace Context)."""
API_HEADER = "ElasticFlow-API"
VERSION_HEADER = "ElasticFlow-Version"
"""Every answer of a service carries the two, so that a client of another version can say so."""


class Wire(BaseModel):
    """Base of all messages: unknown fields are an error on the way in, so that a typing mistake is found at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def as_stored(cls, raw: Mapping[str, Any]) -> Self:
        """What was taken in before, as it is, of plain values: what an older version allowed can still be read."""
        return super().model_construct(**raw)


class Problem(Wire):
    """Body of every error answer: what was wrong, and what to do."""

    error: str
    message: str
    hint: str = ""

"""The OpenAPI document of the HTTP API: made from the application, for the reference and for generators of clients.

``python -m elasticflow_airflow.service.openapi`` prints it. A running service does not serve it: nothing but
``/healthz`` answers without the token.
"""

from __future__ import annotations

import json
import sys
from typing import Any, cast

import sqlalchemy
from fastapi.routing import APIRoute

from elasticflow_airflow.service.api import ServiceParts, build_app
from elasticflow_airflow.wire import Problem

_OPEN = ("/healthz",)
_DESCRIPTION = (
    "What Airflow, the command line and the pages ask the elasticflow service. Times are UTC seconds, durations"
    " seconds. Every call may be repeated. Every error body is a Problem."
)


class _NotRunning:
    """Stands for the parts of a service that never runs: its routes are looked at, and never called."""

    engine = sqlalchemy.create_engine("sqlite://")
    """Statements are timed on the store's engine, which must be one; this one never connects."""

    def __getattr__(self, name: str) -> _NotRunning:
        return self


def document() -> dict[str, Any]:
    """Make the document: what FastAPI knows, with our error bodies and the token."""
    app = build_app(cast(ServiceParts, _NotRunning()), token=None)
    app.description = _DESCRIPTION
    for route in app.routes:
        if isinstance(route, APIRoute):
            route.operation_id = route.name
    made = app.openapi()
    problem = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}}
    for path, operations in made["paths"].items():
        for operation in operations.values():
            operation.pop("summary", None)  # FastAPI's is the function's name
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "Refused: what was wrong, and what to do", **problem}
            if path in _OPEN:
                operation["security"] = []
    components = made.setdefault("components", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    components["schemas"]["Problem"] = Problem.model_json_schema()
    components["schemas"] = dict(sorted(components["schemas"].items()))
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    made["security"] = [{"token": []}]
    return made


def main() -> None:
    """Print the document."""
    sys.stdout.write(json.dumps(document(), indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Makes the OpenAPI document of the HTTP API from the application, for the reference and for client generators.

``python -m elasticflow_airflow.service.http.openapi`` prints it. A running service does not serve it: only
``/healthz`` and ``/readyz`` answer without the token.
"""

from __future__ import annotations

import json
import sys
from http import HTTPStatus
from typing import Any, cast

import sqlalchemy
from fastapi.routing import APIRoute

from elasticflow_airflow.api import Problem
from elasticflow_airflow.service.http.app import build_app
from elasticflow_airflow.service.http.connections import STATUSES as OF_CONNECTIONS
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.refusal import MEANINGS

_OPEN = ("/healthz", "/readyz")
_ALL = (401, 500, 503)
"""The refusals of every call except the open ones."""
_WITH_ARGUMENTS = (422,)
_HEADERS = {401: "WWW-Authenticate", 503: "Retry-After"}
_CLAIMED = {"claim": "$response.body#/claim"}
_LINKS = {
    "status": None,
    "job_events": None,
    "story": None,
    "runs": None,
    "attach": {},
    "amend": _CLAIMED,
    "lease": _CLAIMED,
    "cancel": _CLAIMED,
    "acknowledge": _CLAIMED,
}
"""The operations that can follow a submit, and the body that each takes (None: no body)."""
_DESCRIPTION = (
    "What Airflow, the command line and the pages ask the elasticflow service. Times are UTC seconds, durations"
    " seconds. Every call may be repeated. Every error body is a Problem."
)


class _NotRunning:
    """Stands for the parts of a service that never runs: its routes are inspected, but never called."""

    engine = sqlalchemy.create_engine("sqlite://")
    """Statement timing needs a real engine; this one never connects."""

    def __getattr__(self, name: str) -> _NotRunning:
        return self


def document() -> dict[str, Any]:
    """Make the document: FastAPI's own, with our error bodies and the token."""
    app = build_app(cast(ServiceParts, _NotRunning()), token=None)
    app.description = _DESCRIPTION
    for route in app.routes:
        if isinstance(route, APIRoute):
            route.operation_id = route.name
    made = app.openapi()
    for path, operations in made["paths"].items():
        for operation in operations.values():
            operation.pop("summary", None)  # FastAPI's is the function's name
            if path in _OPEN:
                operation["security"] = []
            for parameter in operation.get("parameters", ()):
                _never_null(parameter["schema"])
            operation["responses"] = _answers(operation, is_open=path in _OPEN)
    for status in ("200", "201"):
        made["paths"]["/v1/jobs/{job_id}"]["put"]["responses"][status]["links"] = {
            name: {
                "operationId": name,
                "parameters": {"job_id": "$request.path.job_id"},
                **({} if body is None else {"requestBody": body}),
            }
            for name, body in _LINKS.items()
        }
    components = made.setdefault("components", {})
    components["responses"] = {_named(status): _refusal(status) for status in sorted(MEANINGS)}
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    components["schemas"]["Problem"] = Problem.model_json_schema()
    components["schemas"] = dict(sorted(components["schemas"].items()))
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    made["security"] = [{"token": []}]
    return made


def _answers(operation: dict[str, Any], *, is_open: bool) -> dict[str, Any]:
    """Return the answers of an operation: its own, and references to the refusals."""
    own = {status: answer for status, answer in operation["responses"].items() if int(status) < 400}
    refusals = {int(status) for status in operation["responses"]} - {int(status) for status in own} - {422}
    refusals |= {*OF_CONNECTIONS}
    if not is_open:
        refusals |= {*_ALL}
    if "parameters" in operation or "requestBody" in operation:
        refusals |= {*_WITH_ARGUMENTS}
    return own | {str(status): {"$ref": f"#/components/responses/{_named(status)}"} for status in sorted(refusals)}


def _never_null(schema: dict[str, Any]) -> None:
    """Remove null from the type of an optional parameter: paths and queries have no null."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) == 1:
        del schema["anyOf"]
        schema.update(kinds[0])


def _named(status: int) -> str:
    return HTTPStatus(status).phrase.replace(" ", "")


def _refusal(status: int) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    headers = {_HEADERS[status]: {"schema": {"type": "string"}}} if status in _HEADERS else {}
    return {"description": MEANINGS[status], "content": body, **({"headers": headers} if headers else {})}


def main() -> None:
    """Print the document."""
    sys.stdout.write(json.dumps(document(), indent=1) + "\n")


if __name__ == "__main__":
    main()

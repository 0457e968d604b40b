"""The routes about code snapshots, which are uploaded before the jobs that need them. Rules: ``snapshots.py``."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from elasticflow_airflow.service.http.lanes import Lanes
from elasticflow_airflow.service.http.parameters import Sha256
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.job_files.snapshots import SnapshotRefusedError
from elasticflow_airflow.service.refusal import Refusal, declared

_TAR = {"schema": {"type": "string", "format": "binary"}}
_TAR_BODY = {"requestBody": {"required": True, "content": {"application/x-tar": _TAR}}}


def add_snapshots(app: FastAPI, parts: ServiceParts, lanes: Lanes) -> None:
    """Add the routes."""

    @app.head("/v1/snapshots/{sha256}", status_code=204, include_in_schema=False)
    @app.get("/v1/snapshots/{sha256}", status_code=204, responses=declared(404))
    @lanes.reading
    def has_snapshot(sha256: Sha256) -> Response:
        """Check whether a code snapshot was uploaded: 204 if so, else 404."""
        if not parts.snapshots.has(sha256):
            raise Refusal(404, "snapshot_missing", f"the code {sha256} was not uploaded", "upload it")
        return Response(status_code=204)

    @app.put("/v1/snapshots/{sha256}", status_code=204, openapi_extra=_TAR_BODY, responses=declared(413, 507))
    async def put_snapshot(sha256: Sha256, request: Request) -> Response:
        """Upload a code snapshot: an uncompressed tar of relative paths.

        `sha256` is the SHA-256 of the tar itself, in lowercase hexadecimal.
        """
        incoming = await run_in_threadpool(parts.snapshots.incoming)
        try:
            size = 0
            with incoming.open("wb") as file:
                async for chunk in request.stream():
                    size += len(chunk)
                    # A tar has headers and padding: twice the limit is enough for any contents within it.
                    if size > 2 * parts.snapshots.max_bytes:
                        raise Refusal(
                            413,
                            "snapshot_too_large",
                            f"the code is larger than {parts.snapshots.max_bytes} bytes",
                            "put the script in a folder of its own, or ignore what it does not need",
                        )
                    await run_in_threadpool(file.write, chunk)
            await lanes.unpacking.run(partial(parts.snapshots.accept, sha256, incoming))
        except SnapshotRefusedError as error:
            status = 413 if error.too_large else 422
            raise Refusal(status, "snapshot_refused", str(error), error.hint) from error
        except OSError as error:
            raise Refusal(
                507,
                "disk",
                f"the code could not be kept: {error.strerror or error}",
                "free space in the state directory",
            ) from error
        finally:
            incoming.unlink(missing_ok=True)
        return Response(status_code=204)

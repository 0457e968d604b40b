"""Which service the command line talks to: ``--url``, else the embedded service of the state directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, Endpoint, default_state_dir

URL_ENV = "ELASTICFLOW_URL"
TOKEN_ENV = "ELASTICFLOW_TOKEN"  # noqa: S105 - the name of a variable, not a token

Url = typer.Option(
    None,
    "--url",
    envvar=URL_ENV,
    help=f"Address of the service: http://host:port, https://host:port or unix:///path; the token: {TOKEN_ENV}. "
    "Without it: the embedded service of the state directory.",
)
StateDir = typer.Option(
    None, "--state-dir", envvar="ELASTICFLOW_STATE_DIR", help="State directory of the embedded service."
)


@contextmanager
def client(url: str | None, state_dir: Path | None) -> Iterator[ElasticFlowClient]:
    """Open a client; whatever the service refuses ends the command with the message and status 1."""
    try:
        if url:
            endpoint = Endpoint.from_url(url, token=os.environ.get(TOKEN_ENV))
        else:
            endpoint = Endpoint(socket_path=(state_dir or default_state_dir()) / "service.sock")
        with ElasticFlowClient(endpoint, retry_for_s=0) as opened:
            yield opened
    except ElasticFlowError as error:
        Console(stderr=True).print(f"elasticflow: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error

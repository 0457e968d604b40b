"""``elasticflow node``: the agent of a machine whose slots a service on another machine uses."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer


def node(
    folder: Annotated[Path, typer.Option(help="Its own folder, on a local disk.")],
    shared_dir: Annotated[
        str, typer.Option(metavar="PATH|URL", help="Where checkpoints are, for all nodes and the service.")
    ],
    listen: str = typer.Option(metavar="HOST:PORT", help="Where the service reaches it; port 0: any free one."),
    node_id: str | None = typer.Option(None, help="Name of this node; the host name by default.", show_default=False),
    slots: int | None = typer.Option(None, min=1, help="Slots to offer; all GPUs, or CPU cores, by default."),
    address: str | None = typer.Option(None, help="Where workers of other nodes reach this one's; HOST by default."),
    interface: str | None = typer.Option(None, help="Network interface of that address."),
    slot_lock_dir: Annotated[Path | None, typer.Option(help="Machine-wide folder of the slot locks.")] = None,
    notice_file: Annotated[
        Path | None,
        typer.Option(
            help="Once this file exists the machine goes away, after the number of seconds in it: its jobs leave it."
        ),
    ] = None,
    warm_imports: str | None = typer.Option(None, help="Modules to import in advance, separated by commas."),
) -> None:
    """Run the agent of a machine whose slots a service on another machine uses.

    The token that it shares with the service is in ELASTICFLOW_NODE_TOKEN, or in the file that
    ELASTICFLOW_NODE_TOKEN_FILE names. It ends at SIGTERM; training goes on, and the next agent finds it.
    """
    from elasticflow_airflow.engines.cluster.agent_server import AgentOptions, read_token, run_agent

    try:
        token = read_token(os.environ)
    except (ValueError, OSError) as error:
        typer.echo(f"the node agent cannot start: {error}", err=True)
        raise typer.Exit(2) from error
    modules = None if warm_imports is None else tuple(name.strip() for name in warm_imports.split(",") if name.strip())
    options = AgentOptions(
        state_dir=folder,
        shared_dir=shared_dir,
        listen=listen,
        node_id=node_id or socket.gethostname(),
        slots=slots,
        address=address,
        interface=interface,
        slot_lock_dir=slot_lock_dir,
        warm_imports=modules,
        notice_file=notice_file,
    )
    raise typer.Exit(run_agent(options, token))

"""``python -m elasticflow_airflow.service``: run the service in the foreground, or embedded in a state directory."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from elasticflow_airflow.api import ServiceCard
from elasticflow_airflow.service.daemon import (
    CannotServeError,
    lock_state_dir,
    log,
    serve,
)
from elasticflow_airflow.service.settings import ServiceSettings, problems_of
from elasticflow_airflow.service.store.service_lock import describe
from elasticflow_airflow.service.telemetry.service_log import set_up_logging

CANNOT_SERVE = "elasticflow: "
"""Prefix of the sentence that says why it cannot serve; the starting process looks for it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns the exit status. If embedded, another service on the same state directory is no error."""
    parser = argparse.ArgumentParser(prog="python -m elasticflow_airflow.service", description=__doc__)
    parser.add_argument("--embedded", action="store_true", help="Unix socket; leave when idle")
    parser.add_argument("--state-dir", type=Path)
    options = parser.parse_args(arguments)
    if options.state_dir is not None:
        os.environ["ELASTICFLOW_STATE_DIR"] = str(options.state_dir)
    try:
        settings = ServiceSettings()
    except ValidationError as error:
        for problem in problems_of(error):
            sys.stderr.write(f"{CANNOT_SERVE}{problem}\n")
        return 2
    os.umask(0o077)
    written = set_up_logging(settings.log_level)
    try:
        with lock_state_dir(settings.state_dir) as ours:
            if not ours:
                card = ServiceCard.read(settings.state_dir)
                holder = describe({} if card is None else card.owner)
                log.info("another service holds this state directory", state_dir=str(settings.state_dir), holder=holder)
                return 0 if options.embedded else 1
            serve(settings, embedded=options.embedded)
    except CannotServeError as error:
        written.write(f"{CANNOT_SERVE}{error}\n")
        return 1
    finally:
        written.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Torchrun rendezvous by membership plan: backend ``elasticflow`` (entry point ``torchrun.handlers``).

In torchrun's own rendezvous any node that arrives in time may join. Here the service decides: an agent waits until the
plan contains its worker. For torchrun each agent is a world of one, so that no agent waits for another to start or to
end, and workers join, leave and die independently. Rank and size from the plan bypass torchrun on their way to the
trainer (``WORLD_ENV``). For scripts without a session rank 0's agent opens a new TCPStore and publishes its address in
the incarnation's folder; their ``init_process_group`` uses it. May import torch and the standard library only.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not marked so by torch
    HashStore,
    TCPStore,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousHandlerCreator

from elasticflow_airflow.runtime.gang.meeting_store import publish_store, wait_for_address
from elasticflow_airflow.runtime.protocol import (
    GENERATION_ENV,
    WORKER_ENV,
    WORLD_ENV,
    Membership,
    RescaleMode,
    rendezvous_path,
)

BACKEND = "elasticflow"
DEFAULT_TIMEOUT_S = 600
_POLL_S = 0.02

logger = logging.getLogger(__name__)


class PlanRendezvous(RendezvousHandler):
    """Rendezvous by membership plan.

    ``incarnation_dir`` (torchrun's ``--rdzv-endpoint``) is the folder of plan and address. The handler always reports
    zero waiting nodes to the agent: workers read a new plan by themselves and are never restarted by torchrun for it.
    """

    def __init__(
        self,
        incarnation_dir: Path,
        worker_id: str,
        generation: int,
        run_id: str,
        address: str,
        timeout_s: float,
    ) -> None:
        self._incarnation_dir = incarnation_dir
        self._worker_id = worker_id
        self._generation = generation
        self._run_id = run_id
        self._address = address
        self._timeout_s = timeout_s
        self._closed = False
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name of this backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Make trainers use the store of rank 0's agent, to avoid a second port and another race for it."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the plan and the store. Raises SystemExit(0) if a newer plan does not contain this worker."""
        deadline_s = time.monotonic() + self._timeout_s
        plan = self._wait_for_plan(deadline_s)
        rank, address, port = plan.rank_of(self._worker_id), self._address, 0
        if rank is None:
            raise RuntimeError(f"worker {self._worker_id} is not in the plan of generation {plan.generation}")
        path = rendezvous_path(self._incarnation_dir, plan.generation)
        if plan.mode is RescaleMode.IN_PLACE:
            pass  # workers that join a running training have a session, and sessions form their group by themselves
        elif rank == 0:
            limit = datetime.timedelta(seconds=self._timeout_s)
            self._store = publish_store(path, address, limit)
            port = self._store.port
        else:
            address, port = self._wait_for_address(path, plan, deadline_s)
        # The trainer inherits this variable.
        os.environ[WORLD_ENV] = f"{rank},{len(plan.members)}"
        own: Any = HashStore()
        return RendezvousInfo(own, 0, 1, RendezvousStoreInfo(address, port))

    def is_closed(self) -> bool:
        """Return whether ``set_closed`` or ``shutdown`` was called here."""
        return self._closed

    def set_closed(self) -> None:
        """Mark this handler as closed."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0 always: see the class."""
        return 0

    def get_run_id(self) -> str:
        """Return torchrun's ``--rdzv-id``."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the handler; return True."""
        self._closed = True
        return True

    def _wait_for_plan(self, deadline_s: float) -> Membership:
        while True:
            plan = Membership.read(self._incarnation_dir)
            if plan is not None:
                if plan.rank_of(self._worker_id) is not None:
                    return plan
                if plan.generation >= self._generation:
                    logger.info("generation %s goes on without %s: leaving", plan.generation, self._worker_id)
                    # Not RendezvousGracefulExitError: torchrun would end with status 1 after it.
                    raise SystemExit(0)
            if time.monotonic() > deadline_s:
                self._time_out(f"no membership plan contains worker {self._worker_id}")
            time.sleep(_POLL_S)

    def _wait_for_address(self, path: Path, plan: Membership, deadline_s: float) -> tuple[str, int]:
        def is_left_out() -> bool:
            current = Membership.read(self._incarnation_dir)
            if current is not None and current.rank_of(self._worker_id) is None:
                return True
            if time.monotonic() > deadline_s:
                self._time_out(f"rank 0 of generation {plan.generation} has not opened its store ({path})")
            return False

        found = wait_for_address(path, is_left_out)
        if found is None:
            raise SystemExit(0)
        return found

    def _time_out(self, what: str) -> NoReturn:
        raise RendezvousTimeoutError(f"after {self._timeout_s:.0f} s {what}")


def new_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler of one agent. Raises ValueError if the environment does not name the worker."""
    worker_id, generation = os.environ.get(WORKER_ENV), os.environ.get(GENERATION_ENV)
    if not worker_id or not generation:
        raise ValueError(
            f"rendezvous backend {BACKEND!r} needs {WORKER_ENV} and {GENERATION_ENV}; it is for workers that the "
            "elasticflow service starts. Without the service use --rdzv-backend=c10d or --standalone."
        )
    return PlanRendezvous(
        Path(params.endpoint),
        worker_id,
        int(generation),
        params.run_id,
        params.local_addr or "127.0.0.1",
        float(params.get("timeout", DEFAULT_TIMEOUT_S)),
    )


def create_handler() -> RendezvousHandlerCreator:
    """Return the handler factory. Torch calls this entry point (group ``torchrun.handlers``) without arguments."""
    return new_handler

"""The rendezvous handler that takes our membership plan: backend ``elasticflow`` (entry point ``torchrun.handlers``).

Torchrun's own rendezvous lets whoever comes in time join. Here the service decides who is in: an agent waits until
the plan contains its worker, and gets its rank from there. Rank 0 opens a fresh TCPStore and publishes its address in
the incarnation's folder; the trainers share that store. May import torch and the standard library only.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from pathlib import Path

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not marked so by torch
    DistNetworkError,
    PrefixStore,
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

from elasticflow_airflow.runtime.protocol import (
    GENERATION_ENV,
    WORKER_ENV,
    Membership,
    read_json,
    rendezvous_path,
    write_json_atomic,
)

BACKEND = "elasticflow"
DEFAULT_TIMEOUT_S = 600
GOODBYE_LIMIT_S = 3.0
_POLL_S = 0.02
_ALL_AT_EXIT_KEY = "torchelastic/agent/terminal_state/last_member"
"""Set by the last agent that comes to torchrun's exit barrier (torch.distributed.elastic.utils.store.barrier)."""
_GONE_KEY = "elasticflow/gone"

logger = logging.getLogger(__name__)


class PlanRendezvous(RendezvousHandler):
    """Rendezvous by membership plan.

    ``incarnation_dir`` (torchrun's ``--rdzv-endpoint``) is where plan and address lie. The agent is told that no
    node ever waits: a new plan reaches the workers by themselves, never by a restart that torchrun decides on.
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
        self._agents: PrefixStore | None = None
        self._rank = self._world_size = 0

    def get_backend(self) -> str:
        """Name of this backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Trainers use the store of rank 0's agent: no second port, no second race for it."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the plan and the store. Raises SystemExit(0) when the plan has moved on without this worker."""
        deadline_s = time.monotonic() + self._timeout_s
        plan = self._wait_for_plan(deadline_s)
        rank = plan.rank_of(self._worker_id)
        if rank is None:
            raise RuntimeError(f"worker {self._worker_id} is not in the plan of generation {plan.generation}")
        limit = datetime.timedelta(seconds=self._timeout_s)
        path = rendezvous_path(self._incarnation_dir, plan.generation)
        if rank == 0:
            # Port 0: the kernel picks one that is free; nobody can take it between choice and use.
            self._store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=limit)
            address, port = self._address, self._store.port
            write_json_atomic(path, {"address": address, "port": port, "worker_id": self._worker_id})
        else:
            address, port = self._wait_for_address(path, plan, deadline_s)
            self._store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
        self._agents = PrefixStore(f"agents/g{plan.generation:06d}", self._store)
        self._rank, self._world_size = rank, len(plan.members)
        return RendezvousInfo(self._agents, rank, self._world_size, RendezvousStoreInfo(address, port))

    def is_closed(self) -> bool:
        """Whether set_closed was called here."""
        return self._closed

    def set_closed(self) -> None:
        """Nobody may join through this handler any more."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Never any: see the class."""
        return 0

    def get_run_id(self) -> str:
        """Torchrun's ``--rdzv-id``."""
        return self._run_id

    def shutdown(self) -> bool:
        """Let go. Rank 0, whose agent holds the store, stays until the others have come through the exit barrier.

        Torchrun's own barrier lets rank 0 go first now and then: the others then log a broken connection.
        """
        self._closed = True
        try:
            if self._agents is not None and self._agents.check([_ALL_AT_EXIT_KEY]):
                self._say_goodbye(self._agents)
        except DistNetworkError:
            # Rank 0's agent, and the store with it, has gone first: after a failure nobody waits for anybody. What
            # torchrun is about to say of its own worker must not be drowned by this.
            logger.info("the store of generation %s is gone already", self._generation)
        return True

    def _say_goodbye(self, agents: PrefixStore) -> None:
        agents.add(_GONE_KEY, 1)
        deadline_s = time.monotonic() + GOODBYE_LIMIT_S
        while self._rank == 0 and time.monotonic() < deadline_s and agents.add(_GONE_KEY, 0) < self._world_size:
            time.sleep(_POLL_S)

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
            self._wait(deadline_s, f"no membership plan contains worker {self._worker_id}")

    def _wait_for_address(self, path: Path, plan: Membership, deadline_s: float) -> tuple[str, int]:
        while True:
            found = read_json(path)
            if found is not None:
                return str(found["address"]), int(found["port"])
            current = Membership.read(self._incarnation_dir)
            if current is not None and current.rank_of(self._worker_id) is None:
                raise SystemExit(0)
            self._wait(deadline_s, f"rank 0 of generation {plan.generation} has not opened its store ({path})")

    def _wait(self, deadline_s: float, what: str) -> None:
        if time.monotonic() > deadline_s:
            raise RendezvousTimeoutError(f"after {self._timeout_s:.0f} s {what}")
        time.sleep(_POLL_S)


def new_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler of one agent. Raises ValueError when the environment does not name the worker."""
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
    """Entry point of group ``torchrun.handlers``: torch calls it without arguments, for the maker of handlers."""
    return new_handler

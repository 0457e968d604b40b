"""Starts a generation: writes the files that its supervisors read, and starts the supervisor processes.

Part of the local engine; knows nothing about earlier or later generations. Secrets are not in these files:
``node_manager.py`` pipes them to the supervisor, which puts them into the environment of the workers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elasticflow_airflow.engines.local.files.generation_folder import SupervisorSpec, WorkerSpec
from elasticflow_airflow.engines.local.files.records import GangRecord
from elasticflow_airflow.engines.local.machine.virtual_environments import python_in
from elasticflow_airflow.engines.local.machines import Machines
from elasticflow_airflow.engines.port import GangSpec
from elasticflow_airflow.runtime.protocol import Membership, RescaleMode


class Starter:
    """Writes the files of a generation, and has the machines start its supervisors."""

    def __init__(self, machines: Machines, state_dir: Path, code_root: Path, log_limits: tuple[int, int]) -> None:
        self._machines, self._state_dir, self._log_limits = machines, state_dir, log_limits
        self._code_root = code_root

    def warm_up(self, gang: GangRecord, spec: GangSpec) -> None:
        """Start supervisors that do the imports and then wait: the previous generation may still train."""
        (spec.incarnation_dir / "logs").mkdir(exist_ok=True)
        self.start_supervisors(gang, spec)

    def go(self, gang: GangRecord, spec: GangSpec) -> None:
        """Let the generation start, once: the files that workers read are written before supervisors may go."""
        plan = Membership.read(spec.incarnation_dir) if gang.in_place else None
        told = plan is not None and plan.generation >= gang.generation
        if (told or not gang.in_place) and all(gang.folder(node_id).go.exists() for node_id in gang.nodes):
            return
        spec.session.write()
        Membership(
            generation=gang.generation,
            mode=RescaleMode.IN_PLACE if gang.in_place else RescaleMode.RESTART,
            members=gang.members,
            reason=spec.reason,
            lost=gang.lost,
        ).write(spec.incarnation_dir)
        for node_id in gang.nodes:
            gang.folder(node_id).go.touch()

    def start_supervisors(self, gang: GangRecord, spec: GangSpec) -> None:
        """Start missing supervisors. One that has written a status did run, and is never started again."""
        for node_id in gang.nodes:
            folder = gang.folder(node_id)
            if node_id not in self._machines.nodes:
                continue  # It has not answered a service that has just started: its supervisor may be there.
            if folder.read_status() is None and not self._machines.was_given_up(folder):
                if not folder.has_spec():
                    folder.path.mkdir(parents=True, exist_ok=True)
                    folder.write_spec(self._supervisor_spec(gang, spec, node_id))
                self._machines.spawn(node_id, folder, spec.secret_env)

    def _supervisor_spec(self, gang: GangRecord, spec: GangSpec, node_id: str) -> SupervisorSpec:
        facts = self._machines.facts(node_id)
        node = facts.node(node_id)
        workers = tuple(
            WorkerSpec(
                worker_id=gang.worker_id(rank),
                rank=rank,
                slot_index=slot.index,
                lock_name=node.slots[slot.index].lock_name,
                env=facts.slot_env(slot, spec.env),
                fork_trainer=node.slots[slot.index].gpu is None,
            )
            for rank, slot in enumerate(spec.placement)
            if slot.node_id == node_id and gang.is_born(rank)
        )
        # The service's own interpreter, which is the default, may be another one there.
        base = facts.python if spec.python == sys.executable else spec.python
        own = python_in(Path(facts.state_dir), base, spec.requirements) if spec.requirements else None
        return SupervisorSpec(
            job_id=spec.job_id,
            incarnation=spec.incarnation,
            generation=spec.generation,
            chain=gang.chain or spec.generation,
            node_id=node_id,
            world_size=len(spec.placement),
            incarnation_dir=facts.path_here(spec.incarnation_dir, self._state_dir),
            state_dir=facts.state_dir,
            lock_dir=facts.lock_dir,
            python=base if own is None else str(own),
            base_python=base if own is not None else "",
            requirements=spec.requirements,
            env=facts.worker_env(spec.env),
            workers=workers,
            lease_s=spec.lease_s,
            grace_s=spec.grace_s,
            address=node.address,
            code_dir=facts.path_here(Path(spec.session.code_dir), self._code_root),
            progress_regex=spec.session.progress_regex,
            progress_file=spec.session.progress_file,
            log_segment_bytes=self._log_limits[0],
            log_segments=self._log_limits[1],
        )

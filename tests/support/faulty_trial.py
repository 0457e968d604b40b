"""Faults at random on a cluster of three machines, judged by the history that the workers themselves write."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import snapshot_script
from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder
from support.cluster_trial import ClusterTrial
from support.gang import Gang
from support.machines import Machines
from support.node_agents import agent_command
from support.ray_machines import RayMachines

SCRIPT = Path(__file__).parent / "train_ledger.py"
NODES = 3
BATCH, STEPS_PER_EPOCH = 32, 28
SUSPICION_S = 3
EPOCHS_A_FAULT = 2
"""A training of so many epochs for each fault is not over before the last one."""
SETTLED_S = 240.0
_RAY_BEGINS_S = 15.0
FAULTY = {
    "suspicion_s": SUSPICION_S,
    "grace_s": 5,
    "hang_min_s": 20,
    "max_losses": 1000,
    "in_place_limit_s": 30,
    "start_limit_s": 60,
    "max_restarts": 1000,
    "max_recoveries": 1000,
}
"""Settings of a service that gives nothing up."""
Fault = Callable[[int], Callable[[], object] | None]
"""Befalls a machine; returns what undoes it, if anything has to."""


@dataclass
class FaultyTrial(ClusterTrial):
    """A service over three machines, their faults, and the history."""

    machines: Machines = field(default_factory=lambda: Machines(NODES))
    random: random.Random = field(default_factory=random.Random)
    history: Path = field(default_factory=Path)
    done: Counter[str] = field(default_factory=Counter)

    def train(self, task: str, epochs: int) -> str:
        snapshot = snapshot_script(SCRIPT)
        self.client.upload_snapshot(snapshot)
        submission = JobSubmission(
            identity=JobIdentity(dag_id="daily", run_id="run1", task_id=task),
            command=Command(
                snapshot=snapshot.sha256,
                script=SCRIPT.name,
                env={"TEST_HISTORY": str(self.history), "TEST_STEP_S": "0.4"},
            ),
            length=Length(epochs=epochs),
            global_batch_size=BATCH,
            max_workers=2,
            logical_workers=8,
            seed=7,
            scaling_curve={1: 6.0, 2: 9.0},
            best_effort=True,
        )
        job_id = submission.identity.job_id
        self.claims[job_id] = self.client.submit(submission).claim
        return job_id

    def story(self) -> str:
        """What has happened, and what is now."""
        lines = [repr(self.client.status(job)) for job in self.claims]
        lines += [f"problem: {problem}" for problem in self.client.health().problems]
        for path in sorted(self.state_dir.parent.glob("node*/jobs/*/i*/supervisors/*/status.json")):
            status = SupervisorFolder(path.parent).read_status()
            if status is not None and not status.ended:
                codes = {worker_id: worker.exit_code for worker_id, worker in status.workers.items()}
                lines.append(f"{path.parent.name} of {path.parts[-5]}: told {status.told} {status.reason!r}, {codes}")
        return "\n".join([*lines, super().story()])

    # -- faults. Each returns what undoes it.

    def below_supervisors(self, index: int) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for supervisor in self.supervisors(index):
            with suppress(psutil.Error):
                found += supervisor.children(recursive=True)
        return found

    def supervisors(self, index: int) -> list[psutil.Process]:
        return self.named(index, "workers.supervisor")

    def named(self, index: int, what: str) -> list[psutil.Process]:
        return [one for one in self.machines.processes(index) if what in command_line(one)]

    def signal(self, found: list[psutil.Process], number: signal.Signals) -> None:
        if found:
            with suppress(psutil.Error):  # It has just ended.
                self.random.choice(found).send_signal(number)

    def kill_a_worker(self, index: int) -> None:
        self.signal(self.below_supervisors(index), signal.SIGKILL)

    def stop_a_worker(self, index: int) -> None:
        self.signal(self.below_supervisors(index), signal.SIGSTOP)

    def kill_a_supervisor(self, index: int) -> None:
        self.signal(self.supervisors(index), signal.SIGKILL)

    def stop_a_supervisor(self, index: int) -> Callable[[], object]:
        found = self.supervisors(index)
        self.signal(found, signal.SIGSTOP)
        return lambda: let_go_on(found)

    def kill_the_agent(self, index: int) -> Callable[[], object] | None:
        for one in self.agents(index):
            one.kill()
        return self.starting_the_agent(index)

    def starting_the_agent(self, index: int) -> Callable[[], object] | None:
        command, env = agent_command(self.state_dir.parent, f"node{index}", self.listen(index), 1)
        return lambda: self.machines.run_beside(index, command, env)

    def stop_the_agent(self, index: int) -> Callable[[], object]:
        return stop(self.agents(index))

    def agents(self, index: int) -> list[psutil.Process]:
        return [
            one for one in self.named(index, "cli.main import main") if command_line(one).startswith(sys.executable)
        ]

    def cut_the_power(self, index: int) -> Callable[[], None]:
        self.machines.cut_power(index)

        def start() -> None:
            self.machines.heal(index)
            self.start_node(index)

        return start

    def cut_it_off(self, index: int) -> Callable[[], None]:
        self.machines.cut(index)
        return lambda: self.machines.heal(index)

    def drain(self, index: int) -> Callable[[], None]:
        self.client.drain(f"node{index}", time.time() + SUSPICION_S)

        def undo() -> None:
            self.client.drain(f"node{index}", None)

        return undo

    def kill_the_service(self, index: int) -> Callable[[], None]:
        assert self.service is not None
        self.service.kill()
        self.service.wait()
        return self.start

    def faults(self) -> list[Fault]:
        return [
            *(self.kill_a_worker, self.stop_a_worker, self.kill_a_supervisor, self.stop_a_supervisor),
            *(self.kill_the_agent, self.stop_the_agent, self.cut_the_power, self.cut_it_off),
            *(self.drain, self.kill_the_service),
        ]

    def spoil(self, *faults: Fault) -> None:
        """Faults at once, each on another machine, for shorter or longer than a node is suspected; and what follows."""
        lasts_s = self.random.choice([0.5, 1.5, 2 * SUSPICION_S])
        undo = []
        for fault, index in zip(faults, self.random.sample(range(NODES), len(faults)), strict=True):
            print(f"{time.time():.1f} {fault.__name__} of node{index}, for {lasts_s} s", flush=True)
            undo.append(fault(index))
            self.done[fault.__name__] += 1
        time.sleep(lasts_s)
        for one in filter(None, undo):
            one()
        self.settle()

    def settle(self) -> None:
        """Wait until all machines are there, and all jobs train on."""
        self.wait(lambda: self.nodes() == {f"node{index}" for index in range(NODES)}, "all nodes are there", SETTLED_S)
        for job, claim in self.claims.items():
            step = self.client.renew(job, claim).step
            self.wait(lambda j=job, s=step: self.client.status(j).step > s + 2, f"{job} trains on", SETTLED_S)

    def nodes(self) -> set[str]:
        return {slot.node_id for slot in self.client.health().slots}

    # -- the judge

    def judge(self, weights: set[str], epochs: int) -> list[str]:
        """Return what is wrong with the history."""
        wrong = two_on_one_slot((self.history / "steps").read_text())
        for job in self.claims:
            status, events = self.client.status(job), self.client.events(job)
            assert status.result is not None, self.story()
            metrics = status.result.metrics or {}
            if {metrics["weights"]} != weights:
                wrong.append(f"{job}: its weights are others than without faults")
            if (metrics["least"], metrics["most"]) != (epochs, epochs):
                wrong.append(f"{job}: samples were used {metrics['least']} to {metrics['most']} times, not {epochs}")
            if status.result.steps != epochs * STEPS_PER_EPOCH:
                wrong.append(f"{job}: {status.result.steps} steps")
            published = [event.data["step"] for event in events if event.kind == "checkpoint"]
            wrong += [f"{job}: published {one}, then {other}" for one, other in pairwise(published) if other <= one]
            ends = [event.kind for event in events if event.kind in ("succeeded", "failed", "cancelled")]
            if ends != ["succeeded"]:
                wrong.append(f"{job}: ended as {ends}")
            if status.incarnation != 1:
                wrong.append(f"{job}: it has begun {status.incarnation} times")
        return wrong


@dataclass
class FaultyRayTrial(FaultyTrial):
    """The same on a Ray cluster whose machines are reserved for us, with faults of Ray's own parts."""

    machines: RayMachines = field(kw_only=True)

    def start_node(self, index: int) -> None:
        self.machines.start_node(index)

    def agents(self, index: int) -> list[psutil.Process]:
        return self.named(index, "ray.agent_process")

    def starting_the_agent(self, index: int) -> None:
        """The actor does it."""

    def kill_the_actor(self, index: int) -> None:
        self.signal(self.named(index, "ray::NodeActor"), signal.SIGKILL)

    def kill_ray(self, index: int) -> Callable[[], object]:
        self.machines.kill_raylet(index)
        return lambda: self.machines.start_ray(index)

    def stop_ray(self, index: int) -> Callable[[], object]:
        return stop(self.raylets(index))

    def kill_the_head(self, index: int) -> Callable[[], object]:
        """It remembers nothing: as without a head, all of Ray ends on the machines, and is started again there."""
        self.machines.kill_head()

        def start() -> None:
            self.machines.start_head()
            for other in self.machines.running:
                self.machines.kill_raylet(other)
                self.machines.start_ray(other)

        return start

    def faults(self) -> list[Fault]:
        return [*super().faults(), self.kill_the_actor, self.kill_ray, self.stop_ray, self.kill_the_head]

    def settle(self) -> None:
        for index in self.machines.running:
            end_s = time.monotonic() + _RAY_BEGINS_S
            while not (there := self.raylets(index)) and time.monotonic() < end_s:
                time.sleep(0.1)
            if not there:
                self.machines.start_ray(index)  # As systemd does, where Ray has ended itself.
        super().settle()

    def raylets(self, index: int) -> list[psutil.Process]:
        return self.named(index, "/raylet/raylet")


def stop(found: list[psutil.Process]) -> Callable[[], object]:
    """Stop processes; return what lets them go on."""
    for one in found:
        with suppress(psutil.Error):  # It has just ended.
            one.suspend()
    return lambda: let_go_on(found)


def let_go_on(found: list[psutil.Process]) -> None:
    for one in found:
        with suppress(psutil.Error):
            one.resume()


def command_line(process: psutil.Process) -> str:
    """Return it; empty when the process has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def two_on_one_slot(history: str) -> list[str]:
    """Return which workers trained on a machine's only slot while another one did."""
    lives: dict[tuple[str, str], list[float]] = {}
    for line in history.splitlines():
        at, machine, *worker, _ = line.split()
        lives.setdefault((machine, " ".join(worker)), []).append(float(at))
    spans = sorted((machine, min(times), max(times), worker) for (machine, worker), times in lives.items())
    print(f"{sum(map(len, lives.values()))} marks of {len(spans)} workers")
    return [
        f"{machine}: {worker} trained until {until:.2f}, {other} from {begun:.2f}"
        for (machine, _, until, worker), (same, begun, _, other) in pairwise(spans)
        if machine == same and begun < until
    ]


def undisturbed(root: Path, epochs: int) -> set[str]:
    """The weights of one worker alone."""
    with Gang(root, SCRIPT, {"TEST_STEP_S": "0"}, epochs=epochs, global_batch_size=BATCH, logical_workers=8) as gang:
        gang.plan("alone")
        assert gang.finish() == {"alone": 0}, gang.story()
        return {line.split()[1] for line in gang.output() if line.startswith("WEIGHTS")}


def suffer(trial: FaultyTrial, root: Path, count: int) -> None:
    count = int(os.environ.get("FAULTS", count))
    epochs = EPOCHS_A_FAULT * count
    for task in ("one", "other"):
        trial.train(task, epochs)
    trial.settle()
    kinds = trial.faults()
    trial.random.shuffle(kinds)
    left = [*kinds, *(trial.random.choice(kinds) for _ in range(count))][:count]
    while left:
        trial.spoil(*(left.pop() for _ in range(min(len(left), trial.random.choice([1, 1, 2])))))
    assert all(trial.client.status(job).state == "running" for job in trial.claims), "too short for these faults"
    (trial.history / "hurry").touch()
    for job, claim in trial.claims.items():
        trial.wait(lambda j=job, c=claim: trial.client.renew(j, c).state.terminal, f"{job} ends", 400)
    print(dict(trial.done))
    wrong = trial.judge(undisturbed(root / "undisturbed", epochs), epochs)
    assert not wrong, "\n".join([*wrong, trial.story()])

"""What it costs that a job runs on two machines: a change of its size, and the loss of one of them.

    python benchmarks/bench_nodes.py [--changes 5] [--losses 30] [--write]

Two machines are two network and PID namespaces of this one (needs root), with an agent each; the service's engine, real
torchrun and real training (a small convolution, steps of about 0.1 s). A change goes from one worker to two and back,
on one machine and over both, side by side in one call. A loss is a power cut: the link goes down, then everything on
the machine is killed. Its time runs from the cut to the first step of the survivor after it; the node is suspected
after 5 s without an answer.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from results import parser_of, show, table
from support.gang import install
from support.machines import Machines
from support.node_agents import TOKEN, start_agent

from elasticflow_airflow.engines.cluster.cluster_engine import open_cluster_engine
from elasticflow_airflow.engines.local.engine import TorchrunEngine
from elasticflow_airflow.engines.port import GangObservation, GangSpec, GangState
from elasticflow_airflow.runtime.protocol import Report, ReportKind, RescaleMode, SessionConfig
from elasticflow_airflow.scheduler_core.model.values import Slot

SCRIPT = Path(__file__).parents[1] / "tests" / "support" / "train_small.py"
A, B, C = Slot("node0", 0), Slot("node0", 1), Slot("node1", 0)


class Job:
    """One job on an engine, changed in place from generation to generation."""

    def __init__(
        self,
        engine: TorchrunEngine,
        base: Path,
        name: str,
        env: dict[str, str] | None = None,
        global_batch_size: int = 16,
        limit_s: float = 120.0,
    ) -> None:
        self.engine, self.base, self.name, self.generation = engine, base, name, 0
        self._env, self._global_batch_size, self._limit_s = env or {"TEST_STEP_S": "0.1"}, global_batch_size, limit_s
        self.reports: list[Report] = []
        engine.files.prepare(name, 1)

    def spec(self, *slots: Slot, lost: tuple[str, ...] = ()) -> GangSpec:
        self.generation += 1
        return GangSpec(
            job_id=self.name,
            incarnation=1,
            generation=self.generation,
            cleared_generation=0,
            placement=slots,
            session=SessionConfig(
                job_id=self.name,
                incarnation=1,
                incarnation_dir=str(self.engine.files.folder(self.name, 1)),
                code_dir=str(self.base / "code"),
                script="train.py",
                epochs=100_000,
                global_batch_size=self._global_batch_size,
                logical_workers=4,
                seed=7,
            ),
            python=sys.executable,
            env=self._env,
            mode=RescaleMode.RESTART if self.generation == 1 else RescaleMode.IN_PLACE,
            lost=lost,
        )

    def look(self) -> dict[int, GangObservation]:
        found = {gang.generation: gang for gang in self.engine.observe() if gang.job_id == self.name}
        for _, gang in sorted(found.items()):
            self.reports += gang.reports
        return found

    def wait(self, condition: Callable[[dict[int, GangObservation]], object], what: str) -> None:
        end_s = time.monotonic() + self._limit_s
        while not condition(self.look()):
            if time.monotonic() > end_s:
                raise SystemExit(f"waited in vain: {what}")
            time.sleep(0.02)

    def change(self, *slots: Slot, lost: tuple[str, ...] = ()) -> float:
        """Change to these slots; return how long training paused, in seconds."""
        spec = self.spec(*slots, lost=lost)
        self.engine.apply(spec)
        self.wait(lambda gangs: gangs[spec.generation].state is GangState.RUNNING, f"{slots} train")
        mine = [r for r in self.reports if r.generation == spec.generation and r.kind is ReportKind.STARTED]
        return max((float(report.data.get("pause_s", 0.0)) for report in mine), default=0.0)

    def leave(self) -> None:
        """Stop, and wait until nobody is left."""
        self.engine.stop(self.name, 1.0)
        self.wait(lambda gangs: all(g.state is GangState.ENDED for g in gangs.values()), "it leaves")

    def dead(self) -> tuple[str, ...]:
        """Return the workers of the present generation that are dead."""
        return tuple(w.worker_id for w in self.look()[self.generation].workers if w.exit_code is not None)

    def next_step(self) -> float:
        """Return the time of the next step that is reported."""
        known = len(self.reports)
        self.wait(lambda _: any(r.kind is ReportKind.PROGRESS for r in self.reports[known:]), "it makes steps")
        return next(r.at_s for r in self.reports[known:] if r.kind is ReportKind.PROGRESS)


@contextmanager
def cluster(base: Path) -> Iterator[tuple[TorchrunEngine, Machines, list[str]]]:
    machines = Machines(2)
    try:
        urls = [
            start_agent(base, f"node{index}", f"{machines.addresses[index]}:0", 2, machines, index)[1]
            for index in range(2)
        ]
        engine = open_cluster_engine(base / "state", base / "shared", urls, TOKEN)
        yield engine, machines, urls
        engine.close()
    finally:
        machines.close()


def milliseconds(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.0f}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--changes", type=int, default=5)
    parser.add_argument("--losses", type=int, default=30)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "code").mkdir()
        install(SCRIPT, base / "code")
        with cluster(base) as (engine, machines, urls):
            pauses: dict[str, list[float]] = {key: [] for key in ("one, 1-2", "one, 2-1", "two, 1-2", "two, 2-1")}
            job = Job(engine, base, "changes")
            job.change(A)
            for _ in range(options.changes):
                for key, second in (("one", B), ("two", C)):
                    pauses[f"{key}, 1-2"].append(job.change(A, second))
                    job.next_step()
                    pauses[f"{key}, 2-1"].append(job.change(A))
                    job.next_step()
            job.leave()

            losses: list[float] = []
            job = Job(engine, base, "losses")
            job.change(A)
            for index in range(options.losses):
                job.change(A, C)
                job.next_step()
                machines.cut_power(1)
                cut_s = time.time()
                job.wait(lambda _: job.dead(), "it is seen")
                job.change(A, lost=job.dead())
                losses.append(job.next_step() - cut_s)
                engine.forget("losses")
                if index + 1 < options.losses:
                    machines.heal(1)
                    start_agent(base, "node1", urls[1].removeprefix("http://"), 2, machines, 1)
                    job.wait(lambda _: len(engine.inventory()) == 2, "the machine is back")
            job.leave()
    rows = [
        ["1 to 2 workers", milliseconds(pauses["one, 1-2"]), milliseconds(pauses["two, 1-2"])],
        ["2 to 1 workers", milliseconds(pauses["one, 2-1"]), milliseconds(pauses["two, 2-1"])],
    ]
    heads = ["pause of a change in place, ms (median)", "on one machine", "over two machines"]
    show("nodes", table(heads, rows), options)
    losses.sort()
    found = [f"{losses[0]:.1f}", f"{statistics.median(losses):.1f}", f"{losses[-1]:.1f}", str(len(losses))]
    heads = ["from a power cut to the survivor's next step, s: least", "median", "most", "cuts"]
    show("nodes_loss", table(heads, [found]), options)


if __name__ == "__main__":
    main()

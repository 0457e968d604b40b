"""How many deferred tasks one service carries: real triggers ask a real service about jobs that train or wait.

    python benchmarks/bench_deferred.py [--tasks 1000] [--jobs 1000] [--seconds 20] [--database sqlite postgresql]
        [--write]

Starts `elasticflow serve` as users do, with modelled workers on 64 x 8 slots and a job for each task, and waits for the
jobs in one process as Airflow's triggerer does: one `ElasticFlowJobTrigger` each, which asks every five seconds (the
default) and so renews the lease of its job. They are all deferred within five seconds; what they ask is measured two
polls after the last one has had its first answer. Then some of them ask without a pause: how often they are answered
then, times five seconds, is how many tasks this machine could carry, with the triggers on the same cores. A question
counts from when it was asked until its answer was read, waits for a connection included.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

HOME = tempfile.mkdtemp(prefix="ef-deferred-")
os.environ |= {
    "AIRFLOW_HOME": HOME,
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__LOGGING__LOGGING_LEVEL": "ERROR",
}

from results import parser_of, percentile, show, side_by_side  # noqa: E402 - Airflow reads its home when it is imported

from elasticflow_airflow.api import Command, JobIdentity, JobStatus, JobSubmission, Length  # noqa: E402
from elasticflow_airflow.client import AsyncElasticFlowClient, ElasticFlowClient, Endpoint, snapshot_folder  # noqa: E402
from elasticflow_airflow.triggers import ElasticFlowJobTrigger  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.postgres import service_database  # noqa: E402
from support.served import Served  # noqa: E402

POLL_S = 5.0
CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
REPORTS = {"ELASTICFLOW_FAKE": json.dumps({"report_interval_s": 5.0})}
SUBMITTERS = 16
WARM_UP_S = 2 * POLL_S
NAMES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}


async def submit(endpoint: Endpoint, tasks: int, snapshot: str) -> list[tuple[str, int]]:
    """A job for each task, best effort; their ids and claims."""
    made: list[tuple[str, int]] = []
    numbers = iter(range(tasks))

    async def some() -> None:
        async with AsyncElasticFlowClient(endpoint, retry_for_s=300.0, timeout_s=300.0) as client:
            for number in numbers:
                submission = JobSubmission(
                    identity=JobIdentity(dag_id=f"deferred{number}", run_id="bench", task_id="train"),
                    command=Command(snapshot=snapshot, script="train.py", env=REPORTS),
                    length=Length(steps=10**6),
                    global_batch_size=32,
                    best_effort=True,
                    max_workers=1,
                    scaling_curve=CURVE,
                )
                answer = await client.submit(submission)
                made.append((answer.job.job_id, answer.claim))

    await asyncio.gather(*(some() for _ in range(SUBMITTERS)))
    return made


@dataclass
class Asked:
    """What the triggers saw."""

    took_s: list[float] = field(default_factory=list)
    failed: int = 0
    answered: set[str] = field(default_factory=set)
    """The jobs that were asked about."""


@contextlib.contextmanager
def noted() -> Iterator[Asked]:
    """Note how long each question of a trigger takes."""
    asked, ask = Asked(), AsyncElasticFlowClient.renew

    async def renew(self: AsyncElasticFlowClient, job_id: str, claim: int, reason: str = "") -> JobStatus:
        begun_s = time.monotonic()
        try:
            status = await ask(self, job_id, claim, reason)
        except Exception:
            asked.failed += 1
            raise
        asked.took_s.append(time.monotonic() - begun_s)
        asked.answered.add(job_id)
        return status

    with patch.object(AsyncElasticFlowClient, "renew", renew):
        yield asked


@dataclass(frozen=True)
class Measured:
    """One way of asking, for some seconds."""

    first_s: float
    """Until every task had its first answer."""
    per_s: float
    took_s: list[float]
    failed: int
    service_cores: float
    triggers_cores: float

    def ms(self, part: float) -> str:
        """The time that so many of the questions did not exceed, in ms."""
        return f"{1000 * percentile(self.took_s, part):.0f}" if self.took_s else "-"


async def wait_as_triggers(jobs: Sequence[tuple[str, int]], poll_s: float, seconds: float, service: Served) -> Measured:
    """Run a trigger for each job, and measure once they have all begun, spread over a poll as tasks are."""

    async def one(number: int, job_id: str, claim: int) -> None:
        await asyncio.sleep(number / len(jobs) * POLL_S)
        trigger = ElasticFlowJobTrigger(job_id=job_id, claim=claim, poll_interval_s=poll_s)
        async for event in trigger.run():
            raise AssertionError(event)

    with noted() as asked:
        running = [asyncio.create_task(one(number, *job)) for number, job in enumerate(jobs)]
        deferred_s, wanted = time.monotonic(), {job_id for job_id, _ in jobs}
        while not wanted <= asked.answered and not any(task.done() for task in running):
            await asyncio.sleep(0.1)
        first_s = time.monotonic() - deferred_s
        await asyncio.sleep(WARM_UP_S)
        begun_s, service_s, own_s = time.monotonic(), service.cpu_s(), time.process_time()
        asked.took_s.clear()
        asked.failed = 0
        await asyncio.sleep(seconds)
        passed_s = time.monotonic() - begun_s
        measured = Measured(
            first_s=first_s,
            per_s=len(asked.took_s) / passed_s,
            took_s=list(asked.took_s),
            failed=asked.failed,
            service_cores=(service.cpu_s() - service_s) / passed_s,
            triggers_cores=(time.process_time() - own_s) / passed_s,
        )
        broken = [task for task in running if task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task in broken:
            task.result()
    return measured


def measure(service: Served, tasks: int, count: int, seconds: float, code: Path) -> list[tuple[str, str]]:
    """The rows of one database."""
    service.start()
    try:
        connection = {"conn_type": "elasticflow", "host": "127.0.0.1", "port": service.port, "password": service.token}
        os.environ["AIRFLOW_CONN_ELASTICFLOW_DEFAULT"] = json.dumps(connection)
        snapshot = snapshot_folder(code)
        with ElasticFlowClient(service.endpoint) as client:
            client.upload_snapshot(snapshot)
        begun_s = time.monotonic()
        jobs = asyncio.run(submit(service.endpoint, count, snapshot.sha256))
        print(f"{count} jobs submitted in {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
        shared = [jobs[number % len(jobs)] for number in range(tasks)]
        usual = asyncio.run(wait_as_triggers(shared, POLL_S, seconds, service))
        full = asyncio.run(wait_as_triggers(jobs[:100], 0.0, seconds / 2, service))
        service.stop()
    finally:
        service.end()
    return [
        ("all have had their first answer after, s", f"{usual.first_s:.0f}"),
        ("polls due per second", f"{tasks / POLL_S:.0f}"),
        ("polls answered per second", f"{usual.per_s:.0f}"),
        ("a poll takes, median, ms", usual.ms(0.5)),
        ("... p99, ms", usual.ms(0.99)),
        ("polls that failed", str(usual.failed)),
        ("cores that the service uses", f"{usual.service_cores:.2f}"),
        ("cores that the triggers use", f"{usual.triggers_cores:.2f}"),
        ("answered without a pause, a second", f"{full.per_s:.0f}"),
        ("... processor time of the service each, ms", f"{1000 * full.service_cores / max(full.per_s, 1e-9):.1f}"),
        ("... processor time of the triggers each, ms", f"{1000 * full.triggers_cores / max(full.per_s, 1e-9):.1f}"),
        ("... which is as many tasks", f"{POLL_S * full.per_s:.0f}"),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--jobs", type=int, help="fewer than tasks, which then share them (default: as many)")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--database", nargs="+", choices=list(NAMES), default=list(NAMES))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    columns: dict[str, list[tuple[str, str]]] = {}
    with tempfile.TemporaryDirectory(prefix="ef-deferred-") as folder:
        code = Path(folder) / "code"
        code.mkdir()
        (code / "train.py").write_text("print()\n")
        for kind in options.database:
            with service_database(kind) as url:
                settings: dict[str, object] = {"virtual_nodes": "64x8"}
                settings |= {} if url is None else {"database_url": url}
                service, count = Served(Path(folder) / kind, settings), options.jobs or options.tasks
                columns[NAMES[kind]] = measure(service, options.tasks, count, options.seconds, code)
    show("deferred", side_by_side(f"{options.tasks} deferred tasks", columns), options)


if __name__ == "__main__":
    main()

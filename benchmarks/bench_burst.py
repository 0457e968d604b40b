"""A midnight burst: many submits at once, onto a cluster that trains already; what everybody else waits meanwhile.

    python benchmarks/bench_burst.py [--submits 500] [--clients 50] [--running 100] [--database sqlite postgresql]
        [--kill] [--one-by-one] [--not-alone] [--write]

Starts `elasticflow serve` as users do, with the default configuration and modelled workers on 64 x 8 slots, and lets
jobs train that report every five seconds. Then many clients submit jobs at once: deadlines from ten minutes to six
hours, scaling curves to eight workers, a third best effort. Beside them, processes of their own ask for ``/healthz``,
``/v1/health`` and a job's status at a fixed pace; a question counts from the moment at which it was due.

What was decided is compared with the same jobs in the same order, one by one, through the scheduler alone, at the
moments at which the service decided. ``--one-by-one`` also serves them one by one. ``--kill``: the service is killed
(``kill -9``) when half of the submits are answered, and started again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import multiprocessing as mp
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from results import parser_of, percentile, show, side_by_side

from elasticflow_airflow.api import Command, JobIdentity, JobStatus, JobSubmission, Length
from elasticflow_airflow.client import ElasticFlowClient, snapshot_folder
from elasticflow_airflow.client.async_client import AsyncElasticFlowClient
from elasticflow_airflow.client.endpoint import Endpoint
from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import Admit, Reject, Resize
from elasticflow_airflow.scheduler_core.model.values import Job, Node, OnReject, Placement, ScalingCurve
from elasticflow_airflow.service.decisions.pass_context import costs_from
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.documents.job_documents import InPlaceRecord, MeasuredCosts

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.postgres import service_database
from support.served import Served

CURVE = {1: 10.0, 2: 18.0, 4: 32.0, 8: 56.0}
NEEDED = ((1, 0.55), (2, 0.25), (4, 0.15), (8, 0.05))
"""How many workers a job needs for its deadline, and how often."""
NODES, SLOTS = 64, 8
HOUR_S = 3600.0
REPORTS = {"ELASTICFLOW_FAKE": json.dumps({"report_interval_s": 5.0})}
VERDICTS = ("admitted", "rejected")
ASKED = {"healthz": ("/healthz", 0.05), "health": ("/v1/health", 1.0), "status": ("/v1/jobs/{job}", 0.05)}
"""What is asked beside the burst: its path, and how many seconds apart."""
LIMIT_S = 900.0


# -- the jobs ---------------------------------------------------------------------------------------------------------


def training(task: str, number: int, snapshot: str, **given: Any) -> JobSubmission:
    """A submission; ``given`` says its length and deadline."""
    return JobSubmission(
        identity=JobIdentity(dag_id=f"{task}{number}", run_id="midnight", task_id="train"),
        command=Command(snapshot=snapshot, script="train.py", env=REPORTS),
        global_batch_size=64,
        max_workers=8,
        scaling_curve=CURVE,
        lease_s=HOUR_S,
        **given,
    )


def running_jobs(count: int, snapshot: str) -> list[JobSubmission]:
    """Jobs that train already when the burst comes: promised, and content with one worker."""
    hours = 12.0
    steps = int(0.6 * hours * HOUR_S * CURVE[1])
    deadline_at = time.time() + hours * HOUR_S
    return [training("running", n, snapshot, length=Length(steps=steps), deadline_at=deadline_at) for n in range(count)]


def burst(count: int, snapshot: str, seed: int = 1) -> list[JobSubmission]:
    """What comes at midnight: the same jobs for the same seed, but for the moment from which deadlines count."""
    chance, now, jobs = random.Random(seed), time.time(), []
    for number in range(count):
        deadline_s = math.exp(chance.uniform(math.log(600.0), math.log(6 * HOUR_S)))
        needed = chance.choices([size for size, _ in NEEDED], [weight for _, weight in NEEDED])[0]
        steps = max(1, int(chance.uniform(0.5, 0.85) * deadline_s * CURVE[needed]))
        terms = {"best_effort": True} if chance.random() < 1 / 3 else {"deadline_at": now + deadline_s}
        jobs.append(training("burst", number, snapshot, length=Length(steps=steps), **terms))
    return jobs


# -- the service ------------------------------------------------------------------------------------------------------


@dataclass
class Service(Served):
    """The service of a round, and what it takes."""

    database_url: str | None = None

    def __post_init__(self) -> None:
        self.settings = {"virtual_nodes": f"{NODES}x{SLOTS}"}
        if self.database_url is not None:
            self.settings["database_url"] = self.database_url

    def memory_mib(self, what: str = "VmRSS") -> float:
        """Its resident memory now, or (``VmHWM``) the most that it was."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{what}:"):
                return int(line.split()[1]) / 1024
        raise LookupError(what)

    def database_mib(self) -> float:
        """Size of the database."""
        if self.database_url is None:
            return sum(path.stat().st_size for path in self.state_dir.glob("elasticflow.db*")) / 2**20
        import psycopg

        with psycopg.connect(self.database_url) as connection:
            row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        assert row is not None
        return float(row[0]) / 2**20


# -- who asks ---------------------------------------------------------------------------------------------------------


@dataclass
class Answers:
    """What the clients saw; times are UTC seconds."""

    begun_at: float
    submitted: dict[str, float] = field(default_factory=dict)
    """When the submit of a job was answered."""
    took_s: list[float] = field(default_factory=list)
    decided: dict[str, float] = field(default_factory=dict)
    """When its verdict was known to its client."""
    without_verdict: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    """Answers by HTTP status; 0: none came."""


class CountingTransport(httpx.AsyncHTTPTransport):
    """Counts what comes back, before a client tries again."""

    def __init__(self, statuses: Counter[int]) -> None:
        super().__init__()
        self._statuses = statuses

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await super().handle_async_request(request)
        except httpx.TransportError:
            self._statuses[0] += 1
            raise
        self._statuses[response.status_code] += 1
        return response


def decided(status: JobStatus) -> bool:
    """Whether its verdict is there."""
    return status.verdict.decision != "undecided" or status.state.terminal


async def _submit_all(endpoint: Endpoint, jobs: Sequence[JobSubmission], clients: int, answered: Any) -> Answers:
    answers, waiting = Answers(time.time()), iter(jobs)

    async def one() -> None:
        transport, mine = CountingTransport(answers.statuses), []
        async with AsyncElasticFlowClient(endpoint, retry_for_s=LIMIT_S, transport=transport) as client:
            for job in waiting:
                begun_s = time.monotonic()
                attachment = await client.submit(job)
                answers.took_s.append(time.monotonic() - begun_s)
                answers.submitted[job.identity.job_id] = time.time()
                with answered.get_lock():
                    answered.value += 1
                if decided(attachment.job):
                    answers.decided[job.identity.job_id] = time.time()
                else:
                    answers.without_verdict += 1
                    mine.append(job.identity.job_id)
            while mine:
                await asyncio.sleep(1.0)
                for job_id in list(mine):
                    if decided(await client.status(job_id)):
                        answers.decided[job_id] = time.time()
                        mine.remove(job_id)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one())
    return answers


def submit_all(endpoint: Endpoint, jobs: Sequence[JobSubmission], clients: int, answered: Any, found: Any) -> None:
    """A process of its own: ``clients`` at once share the jobs, each submits one after the other."""
    found.put(asyncio.run(_submit_all(endpoint, jobs, clients, answered)))


def ask_on(endpoint: Endpoint, path: str, every_s: float, job_ids: Sequence[str], stop: Any, found: Any) -> None:
    """A process of its own: asks the same again and again. How long each took from when it was due, in seconds."""
    took_s, failed, ids = [], 0, itertools.cycle(job_ids)
    with httpx.Client(base_url=endpoint.base_url, headers=endpoint.headers, timeout=300.0) as client:
        due_s = time.monotonic()
        while not stop.is_set():
            time.sleep(max(0.0, due_s - time.monotonic()))
            try:
                failed += client.get(path.format(job=next(ids))).status_code != 200
            except httpx.TransportError:
                failed += 1
            took_s.append(time.monotonic() - due_s)
            due_s += every_s
    found.put((took_s, failed))


# -- what should have been decided -----------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What the service decided of a job."""

    job: JobSubmission
    admitted: bool
    at: float


@dataclass
class Decided:
    """What the service decided, in its order."""

    order: list[Verdict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Jobs that are lost, or of which something happened twice."""
    at_risk: int = 0
    """Promises that may not be kept any more, or were not."""

    @property
    def share(self) -> float:
        """Part of those with a deadline that was admitted."""
        asked = [admitted for job, admitted, _ in self.order if not job.best_effort]
        return sum(asked) / max(1, len(asked))


def look_up(endpoint: Endpoint, jobs: Sequence[JobSubmission]) -> Decided:
    """Read what became of every job, and whether it was decided on exactly once."""
    found, by_event = Decided(), {}
    with ElasticFlowClient(endpoint, retry_for_s=60.0, timeout_s=60.0) as client:
        for job in jobs:
            job_id = job.identity.job_id
            status, events = client.status(job_id), client.events(job_id)
            kinds = Counter(event.kind for event in events)
            verdicts = [event for event in events if event.kind in VERDICTS]
            if len(verdicts) != 1 or kinds["submitted"] != 1 or status.incarnation != 1:
                found.problems.append(f"{job_id}: incarnation {status.incarnation}, events {dict(kinds)}")
            found.at_risk += kinds["at_risk"] > kinds["on_track"]
            if verdicts:
                by_event[verdicts[0].event_id] = Verdict(job, verdicts[0].kind == "admitted", verdicts[0].at)
    found.order = [by_event[event_id] for event_id in sorted(by_event)]
    return found


def alone(
    before: Sequence[tuple[JobSubmission, bool, float]], asked: Sequence[tuple[JobSubmission, bool, float]]
) -> list[bool]:
    """The verdicts of the scheduler alone: jobs one by one, in the order and at the moments that the service had."""
    s, config = ServiceSettings(engine="fake"), SchedulerConfig.served()
    scheduler = Scheduler(config, [Node(node_id=f"node{n}", slots=SLOTS) for n in range(NODES)])
    starting: dict[str, tuple[float, Placement]] = {}
    verdicts = []

    def tell(event: ev.Event, now: float) -> bool:
        admitted = False
        for decision in scheduler.handle(event, now):
            if isinstance(decision, Resize):
                starting[decision.job_id] = (now + 1.0, decision.placement)
            admitted = admitted or isinstance(decision, Admit)
            if isinstance(decision, Reject):
                starting.pop(decision.job_id, None)
        return admitted

    for submission, _, at in [*before, *asked]:
        for job_id, (started_at, placement) in list(starting.items()):
            if started_at <= at and starting.get(job_id) == (started_at, placement):
                del starting[job_id]
                tell(ev.GangStarted(job_id, placement), at)
        job = Job(
            job_id=submission.identity.job_id,
            submitted_s=at,
            deadline_s=submission.deadline_at,
            total_steps=float(submission.length.steps or 0),
            curve=ScalingCurve(CURVE),
            costs=costs_from(s, MeasuredCosts(), InPlaceRecord()),
            max_workers=8,
            on_reject=OnReject(submission.on_reject),
        )
        verdicts.append(tell(ev.JobSubmitted(job), at))
    return verdicts[len(before) :]


# -- one round --------------------------------------------------------------------------------------------------------


@dataclass
class Round:
    """What one burst showed."""

    answers: Answers
    decided: Decided
    alone: list[bool]
    took_s: dict[str, list[float]]
    failed: dict[str, int]
    memory_mib: tuple[float, float]
    database_mib: tuple[float, float]
    cpu_s: float
    lost_running: int

    @property
    def verdicts_s(self) -> float:
        """Until the last verdict was known."""
        return max(self.answers.decided.values(), default=math.inf) - self.answers.begun_at


def one_round(service: Service, options: argparse.Namespace, clients: int, kill: bool) -> Round:
    """Start a service, let jobs train, and send the burst."""
    context = mp.get_context("spawn")
    code = service.state_dir.parent / f"code-{service.state_dir.name}"
    code.mkdir()
    (code / "train.py").write_text("print()\n")
    snapshot = snapshot_folder(code)
    service.start()
    with ElasticFlowClient(service.endpoint, retry_for_s=60.0, timeout_s=60.0) as client:
        client.upload_snapshot(snapshot)
        running = running_jobs(options.running, snapshot.sha256)
        for job in running:
            client.submit(job)
        end_s = time.monotonic() + LIMIT_S
        while any(client.status(job.identity.job_id).state != "running" for job in running):
            if time.monotonic() > end_s:
                sys.exit("the jobs before the burst do not train")
            time.sleep(0.5)
        time.sleep(options.settle_s)
        before = look_up(service.endpoint, running).order
    memory, database, cpu_s = service.memory_mib(), service.database_mib(), service.cpu_s()
    stop, answered = context.Event(), context.Value("i", 0)
    probes = {}
    for name, (path, every_s) in ASKED.items():
        found = context.Queue()
        ids = [job.identity.job_id for job in running]
        given = (service.endpoint, path, every_s, ids, stop, found)
        probes[name] = (context.Process(target=ask_on, args=given), found)
        probes[name][0].start()
    time.sleep(2.0)
    jobs, results = burst(options.submits, snapshot.sha256), context.Queue()
    load = context.Process(target=submit_all, args=(service.endpoint, jobs, clients, answered, results))
    load.start()
    if kill:
        while answered.value < options.submits // 2 and load.is_alive():
            time.sleep(0.01)
        service.kill()
        service.start()
        cpu_s = 0.0
    profiler = _profile(service, options)
    answers = results.get(timeout=2 * LIMIT_S)
    load.join()
    memory_after, database_after, cpu_s = service.memory_mib("VmHWM"), service.database_mib(), service.cpu_s() - cpu_s
    if profiler is not None:
        profiler.send_signal(signal.SIGINT)
        profiler.wait()
    stop.set()
    took = {name: found.get(timeout=LIMIT_S) for name, (_, found) in probes.items()}
    for process, _ in probes.values():
        process.join()
    what = look_up(service.endpoint, jobs)
    what.at_risk += look_up(service.endpoint, running).at_risk
    with ElasticFlowClient(service.endpoint, retry_for_s=60.0, timeout_s=60.0) as client:
        lost = sum(client.status(job.identity.job_id).state.terminal for job in running)
    service.stop()
    return Round(
        answers=answers,
        decided=what,
        alone=[] if options.not_alone else alone(before, what.order),
        took_s={name: values for name, (values, _) in took.items()},
        failed={name: failed for name, (_, failed) in took.items()},
        memory_mib=(memory, memory_after),
        database_mib=(database, database_after),
        cpu_s=cpu_s,
        lost_running=lost,
    )


def _profile(service: Service, options: argparse.Namespace) -> subprocess.Popen[bytes] | None:
    """Look at where the time goes with py-spy, if that was asked for."""
    if options.profile is None:
        return None
    spy = [str(Path(sys.executable).parent / "py-spy"), "record", "--rate", "25", "--format", "raw", "--threads"]
    return subprocess.Popen([*spy, "-o", str(options.profile), "--pid", str(service.pid)])


def rows_of(one: Round, options: argparse.Namespace) -> list[tuple[str, str]]:
    """What is printed of a round, by name."""
    asked = [
        (admitted, own)
        for (job, admitted, _), own in zip(one.decided.order, one.alone, strict=bool(one.alone))
        if not job.best_effort
    ]
    own_share = sum(own for _, own in asked) / max(1, len(asked))

    def ms(name: str, part: float) -> str:
        return f"{1000 * percentile(one.took_s[name], part):.0f}"

    took = one.answers.took_s
    return [
        ("all verdicts after, s", f"{one.verdicts_s:.1f}"),
        ("a submit answered after, median, s", f"{percentile(took, 0.5):.2f}"),
        ("... slowest, s", f"{max(took):.2f}"),
        ("answered without a verdict", str(one.answers.without_verdict)),
        ("answers 503", str(one.answers.statuses[503])),
        ("requests without a response", str(one.answers.statuses[0])),
        ("admitted of those with a deadline", f"{100 * one.decided.share:.1f} %"),
        *(
            [
                ("... by the scheduler alone, one by one", f"{100 * own_share:.1f} %"),
                ("... verdicts that differ", str(sum(admitted != own for admitted, own in asked))),
            ]
            if one.alone
            else []
        ),
        ("promises at risk after it", str(one.decided.at_risk)),
        ("lost, or decided twice", str(len(one.decided.problems) + options.submits - len(one.decided.order))),
        ("jobs that trained before and do not any more", str(one.lost_running)),
        *(
            (f"{label}, {words}, ms", ms(name, part))
            for name, label in (("healthz", "/healthz"), ("status", "a job's status"), ("health", "/v1/health"))
            for part, words in ((0.5, "median"), (0.99, "p99"), (1.0, "slowest"))
        ),
        ("requests without status 200", str(sum(one.failed.values()))),
        ("memory before, MiB", f"{one.memory_mib[0]:.0f}"),
        ("... at most, MiB", f"{one.memory_mib[1]:.0f}"),
        ("the database grew by, MiB", f"{one.database_mib[1] - one.database_mib[0]:.1f}"),
        ("processor time of the service, s", f"{one.cpu_s:.1f}"),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--submits", type=int, default=500)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--running", type=int, default=100)
    parser.add_argument("--database", nargs="+", choices=["sqlite", "postgresql"], default=["sqlite", "postgresql"])
    parser.add_argument("--kill", action="store_true", help="kill the service in the middle, and start it again")
    parser.add_argument("--one-by-one", action="store_true", help="also serve the same jobs one by one, beside it")
    parser.add_argument(
        "--not-alone",
        action="store_true",
        help="do not compare with the scheduler alone, which plans anew for each job and takes longer",
    )
    parser.add_argument("--settle-s", type=float, default=5.0)
    parser.add_argument("--profile", type=Path, help="where py-spy writes what it saw of the service")
    options = parser.parse_args()
    columns: dict[str, list[tuple[str, str]]] = {}
    ways = [("", options.clients)] + ([(", one by one", 1)] if options.one_by_one else [])
    with tempfile.TemporaryDirectory(prefix="ef-burst-") as folder:
        for kind, (words, clients) in itertools.product(options.database, ways):
            name = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}[kind] + words
            with service_database(kind) as url:
                service = Service(Path(folder) / name.replace(" ", "-"), database_url=url)
                try:
                    one = one_round(service, options, clients, options.kill)
                finally:
                    service.end()
            columns[name] = rows_of(one, options)
            print(f"{name}: {json.dumps(dict(columns[name]))}", *one.decided.problems[:5], sep="\n", flush=True)
    name = "burst_kill" if options.kill else "burst_2000" if options.submits == 2000 else "burst"
    assert name in ("burst", "burst_2000", "burst_kill")
    show(name, side_by_side(f"{options.submits} submits by {options.clients} clients", columns), options)


if __name__ == "__main__":
    main()

"""Everything at once, for long: bad requests, reports and rows, bursts, kills of the service; and 100 good clients.

Whatever happens, each of their jobs is promised and kept, or refused because there was no room. Minutes on SQLite,
an hour on PostgreSQL, with an Airflow whose parts are killed, too; ``SOAK_S=<seconds>`` changes both. What is random
comes from ``SOAK_SEED``, which is printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import sqlalchemy as sa
from support import nasty
from support.nasty import SNAPSHOT_ENV, SPARED_ENV
from support.raw_columns import as_stored
from support.served import Served
from support.soaked_airflow import SoakedAirflow

from elasticflow_airflow.api import Command, JobIdentity, JobStatus, JobSubmission, Length
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, snapshot_folder
from elasticflow_airflow.client.async_client import AsyncElasticFlowClient
from elasticflow_airflow.service.http.openapi import document
from elasticflow_airflow.service.store.documents.columns import readable
from elasticflow_airflow.service.store.tables import DrainRow, EventRow, GenerationRow, IncarnationRow

TESTS = Path(__file__).resolve().parents[2]
CLIENTS = 100
NODES, SLOTS = 10, 8
CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
"""What the modelled workers really do, in steps/s."""
GOOD = "good"
"""How the DAGs, and so the jobs, of those begin that do nothing wrong."""
MOST = 4
"""No good or burst job takes more workers."""
LAST_S = 90.0
"""The good ones submit nothing in the last seconds: it takes them longer to come to their ends."""
MARGIN_S = 60.0
"""Promises are kept that early, for all the time in which the service does not decide: killed, or out of breath."""
BREATH_S = 2.0
"""With so many jobs something is decided on all the time: a longer silence is one in which the service did not."""
DECISIONS = ("admitted", "rejected", "resized", "suspended", "started", "succeeded")
POLL_S = 5.0
PATIENCE_S = 300.0
"""So long a client waits for a service that was killed, on a busy machine."""
UNTOUCHED = {"job_id", "incarnation", "generation", "terminal", "drained", "handled", "cancel_reason"}
"""Of stored rows: keys, and what decides whether the loop looks at the row at all."""
MISBEHAVIOURS: list[dict[str, Any]] = [
    {"fail_at_step": 5},
    {"exit_at_step": 5},
    {"nan_loss_at_step": 5},
    {"backwards_at_step": 20},
    {"hang_at_step": 5},
    {"damaged_checkpoints": True},
    {"joiner_dies": 3, "in_place": True},
    {"never_switches": True, "in_place": True},
    {"in_place_pause_s": 1e9, "in_place": True},
    {"initial_loss": 1e300},
    {"metrics": {"accuracy": "x" * 100_000, "deep": [[[[]]]]}},
    {"state_bytes": 10**30},
    {"steps_per_s": {"1": 1e12}},
    {"steps_per_s": {"1": 1e-12}},
    {"nothing_of_that_name": 1},
]


class Stay(NamedTuple):
    """When an incarnation came and ended, and how many slots of its own are enough for what it was promised.

    Good jobs and those of the bursts have time for all their steps with one worker; others get all that they can use.
    """

    submitted_at: float
    finished_at: float | None
    needs: int


@dataclass
class Soak:
    """Who does what until when, and what came of it."""

    service: Served
    database: str
    """SQLAlchemy URL, to write rows by hand."""
    until_s: float
    chance: random.Random
    longest_s: float
    """No good job has a later deadline, in seconds from its submit."""
    snapshot: str = ""
    airflow: SoakedAirflow | None = None
    is_alone: bool = False
    """Whether nothing else runs on this machine, so that the service has no excuse for being late."""
    good: dict[str, JobSubmission] = field(default_factory=dict)
    ended: dict[str, JobStatus] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    """Jobs of the bursts."""
    statuses: Counter[int] = field(default_factory=Counter)
    """Answers of the service, by status."""
    done: Counter[str] = field(default_factory=Counter)
    is_killing: bool = False

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until_s

    async def run(self, base: Path) -> None:
        """All at once. What is wrong with a good client ends it all; the others go on until the time is over."""
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self.go_on_submitting(number))
            chores = [self.burst, self.submit_rubbish, self.misbehave, self.write_rubbish, self.sweep, self.kill]
            if self.airflow is not None:
                chores += [self.trigger, self.kill_airflow]
            for chore in chores:
                group.create_task(self.again_and_again(chore))
            group.create_task(self.call_everything(base))
            group.create_task(self.watch())

    async def again_and_again(self, chore: Callable[[], Awaitable[None]]) -> None:
        while not self.is_over:
            with suppress(ElasticFlowError, httpx.TransportError):
                await chore()
                self.done[chore.__name__] += 1

    def client(self, retry_for_s: float = PATIENCE_S) -> AsyncElasticFlowClient:
        transport = CountingTransport(self.statuses)
        return AsyncElasticFlowClient(
            self.service.endpoint, retry_for_s=retry_for_s, timeout_s=60.0, transport=transport
        )

    def job(self, dag_id: str, run: int, **given: Any) -> JobSubmission:
        fake = {"report_interval_s": 2.0, **given.pop("fake", {})}
        values: dict[str, Any] = {
            "identity": JobIdentity(dag_id=dag_id, run_id=f"run{run}", task_id="train"),
            "command": Command(snapshot=self.snapshot, script="train.py", env={"ELASTICFLOW_FAKE": json.dumps(fake)}),
            "length": Length(steps=given.pop("steps", 100)),
            "global_batch_size": 8,
            "max_workers": MOST,
            "scaling_curve": CURVE,
            **given,
        }
        return JobSubmission(**values)

    # -- who is good ---------------------------------------------------------------------------------------------

    async def go_on_submitting(self, number: int) -> None:
        """One job after the other, each followed to its end."""
        run = 0
        async with self.client() as client:
            await asyncio.sleep(self.chance.uniform(0.0, 20.0))
            while time.monotonic() < self.until_s - LAST_S:
                run += 1
                steps = self.chance.randint(100, 300)
                within_s = self.chance.uniform(150.0, self.longest_s)
                job = self.job(f"{GOOD}{number}", run, steps=steps, deadline_at=time.time() + within_s)
                self.good[job.identity.job_id] = job
                attached = await client.submit(job)
                status = attached.job
                while not status.state.terminal:
                    await asyncio.sleep(POLL_S)
                    status = await client.renew(status.job_id, attached.claim)
                self.ended[status.job_id] = status

    # -- who is not ----------------------------------------------------------------------------------------------

    async def burst(self) -> None:
        """Forty at once, a third of them with deadlines."""
        await asyncio.sleep(self.chance.uniform(10.0, 40.0))
        run = self.done["burst"]
        async with self.client() as client, asyncio.TaskGroup() as group:
            for number in range(40):
                terms = {"deadline_at": time.time() + 150.0} if number % 3 == 0 else {"best_effort": True}
                job = self.job(f"burst{number}", run, steps=200, **terms)
                self.others.add(job.identity.job_id)
                group.create_task(client.submit(job))

    async def submit_rubbish(self) -> None:
        """What no client of ours would send."""
        await asyncio.sleep(self.chance.uniform(0.0, 2.0))
        job = self.job("bad", self.done["submit_rubbish"], best_effort=True)
        body = job.model_dump(mode="json")
        for _ in range(self.chance.randint(1, 3)):
            where = body
            while isinstance(where[(name := self.chance.choice(sorted(where)))], dict) and where[name]:
                where = where[name]
            where[name] = nasty.value(self.chance)
        async with httpx.AsyncClient(transport=CountingTransport(self.statuses), timeout=60.0) as http:
            await http.put(
                f"{self.service.endpoint.base_url}/v1/jobs/{job.identity.job_id}",
                content=json.dumps(body).encode(errors="surrogatepass"),
                headers={**self.service.endpoint.headers, "Content-Type": "application/json"},
            )

    async def misbehave(self) -> None:
        """A job whose workers report rubbish, or fail in one of many ways."""
        await asyncio.sleep(self.chance.uniform(2.0, 8.0))
        terms = {"deadline_at": time.time() + 120.0} if self.chance.random() < 0.5 else {"best_effort": True}
        curve = None if self.chance.random() < 0.3 else CURVE
        fake = self.chance.choice(MISBEHAVIOURS)
        job = self.job("bad", 10**6 + self.done["misbehave"], fake=fake, scaling_curve=curve, steps=400, **terms)
        async with self.client(retry_for_s=0.0) as client:
            await client.submit(job)

    async def write_rubbish(self) -> None:
        """Rows of bad jobs as a version of long ago, or somebody's hand, may have left them."""
        await asyncio.sleep(self.chance.uniform(2.0, 10.0))
        await asyncio.to_thread(self.write_some)

    def write_some(self) -> None:
        engine = sa.create_engine(self.database)
        table = self.chance.choice([IncarnationRow, GenerationRow])
        columns = [column for column in table.__table__.columns if column.name not in UNTOUCHED]
        column = self.chance.choice(columns)
        # What the database does not take is none of the service's trouble; while it is written to, another time.
        with suppress(sa.exc.DBAPIError), engine.begin() as connection:
            job_id = connection.scalar(
                sa.select(IncarnationRow.job_id)
                .where(IncarnationRow.terminal.is_(False), IncarnationRow.job_id.like("bad-%"))
                .order_by(IncarnationRow.submitted_at.desc())
                .limit(1)
            )
            if job_id is not None:
                wrong = {column.name: nasty.storable(self.chance, column)}
                connection.execute(sa.update(table).where(table.job_id == job_id).values(as_stored(table, wrong)))
            if self.chance.random() < 0.1:
                node_id = f"node{self.chance.randrange(10**6)}"
                connection.execute(sa.insert(DrainRow).values(node_id=node_id, until_at=1.8e12))
        engine.dispose()

    async def sweep(self) -> None:
        """Cancel what is not good and has had its time, so that there is room."""
        await asyncio.sleep(10.0)
        await self.cancel_others(since=time.time() - 30.0)

    async def cancel_others(self, since: float | None = None) -> dict[str, str]:
        """Cancel them, but for those that came ``since``; which live still, and what the cancel of each was told.

        When a job came may be a number that was written into its row: nobody could cancel by that.
        """
        found = {}
        async with self.client(retry_for_s=0.0) as client:
            for job in await client.list_jobs(live=True, limit=1000):
                if not job.job_id.startswith(GOOD):
                    found[job.job_id] = f"{job.state}, {job.state_reason}"
                    if since is None or not job.submitted_at > since:
                        try:
                            await client.cancel(job.job_id, job.claim, "swept")
                        except ElasticFlowError as error:
                            found[job.job_id] += f": {error}"
        return found

    async def kill(self) -> None:
        """At any time, the service dies; but mostly after it has decided again, however slow this machine is.

        Where no service ever gets to a decision, no promise can be kept.
        """
        if self.chance.random() < 0.75:
            await asyncio.to_thread(self.wait_for_decisions)
        await asyncio.sleep(self.chance.uniform(15.0, 45.0))
        self.is_killing = True
        await asyncio.to_thread(self.service.kill)
        await asyncio.to_thread(self.service.start)
        self.is_killing = False

    def wait_for_decisions(self) -> None:
        """Return when this service has written its first events (they never cease here), or the time is over."""
        engine = sa.create_engine(self.database)
        since, end = psutil.Process(self.service.pid).create_time(), time.monotonic() + PATIENCE_S
        while not self.is_over:
            assert time.monotonic() < end, f"nothing is decided: {self.service.log_file.read_text()[-3000:]}"
            with suppress(sa.exc.DBAPIError), engine.connect() as connection:  # SQLite may be locked
                latest = sa.select(EventRow.at).order_by(EventRow.event_id.desc()).limit(1)
                if (connection.scalar(latest) or 0.0) > since:
                    break
            time.sleep(0.5)
        engine.dispose()

    async def trigger(self) -> None:
        """A run of Airflow's."""
        await asyncio.sleep(self.chance.uniform(20.0, 60.0))
        assert self.airflow is not None
        await asyncio.to_thread(self.airflow.trigger)

    async def kill_airflow(self) -> None:
        """At any time, a part of Airflow dies."""
        await asyncio.sleep(self.chance.uniform(15.0, 60.0))
        assert self.airflow is not None
        await asyncio.to_thread(self.airflow.disturb, self.chance)

    async def watch(self) -> None:
        """The service never ends by itself; while there are good clients somebody has to tell them."""
        while len(self.ended) < len(self.good) or not self.is_over:
            await asyncio.sleep(1.0)
            process = self.service.process
            assert self.is_killing or process is None or process.poll() is None, (
                f"it ended by itself, with status {process.returncode}: {self.service.log_file.read_text()[-3000:]}"
            )

    async def call_everything(self, base: Path) -> None:
        """Schemathesis, as in its own test. It stumbles over the kills; what counts is what the service says."""
        (base / "openapi.json").write_text(json.dumps(document()))
        said = (base / "schemathesis.log").open("wb")
        while not self.is_over:
            process = await asyncio.create_subprocess_exec(
                str(Path(sys.executable).with_name("schemathesis")),
                *("--config-file", str(TESTS / "service/troubles/schemathesis.toml")),
                *("run", str(base / "openapi.json"), "--url", self.service.endpoint.base_url),
                *("--header", f"Authorization: Bearer {self.service.token}"),
                *("--phases", self.chance.choice(["coverage", "fuzzing", "stateful"])),  # a kill ends each early
                *("--checks", "not_a_server_error", "--seed", str(self.chance.randrange(2**31))),
                *("--max-time", "60", "--max-examples", "10", "--continue-on-failure", "--no-color"),
                env={
                    **os.environ,
                    "PYTHONPATH": str(TESTS),
                    "SCHEMATHESIS_HOOKS": "support.schemathesis_hooks",
                    SNAPSHOT_ENV: self.snapshot,
                    SPARED_ENV: GOOD,
                },
                cwd=base,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
            try:
                await asyncio.wait_for(process.wait(), max(1.0, self.until_s - time.monotonic()))
            except TimeoutError:
                process.kill()
                await process.wait()
            self.done["call_everything"] += 1
        said.close()

    # -- what came of it -----------------------------------------------------------------------------------------

    async def tidy(self) -> None:
        """Cancel all others; everything comes to its end."""
        end = time.monotonic() + PATIENCE_S
        while living := await self.cancel_others():
            assert time.monotonic() < end, f"what was cancelled does not end: {living}"
            await asyncio.sleep(2.0)

    def judge(self) -> list[str]:
        """What is not as it must be, a line each."""
        wrong = [f"answers with status {status}: {n}" for status, n in self.statuses.items() if status in (500, 501)]
        rows, silences = self.read_rows(), self.read_silences()
        with ElasticFlowClient(self.service.endpoint, retry_for_s=60.0, timeout_s=60.0) as client:
            for job_id, job in self.good.items():
                status, events = client.status(job_id), client.events(job_id)
                kinds = Counter(event.kind for event in events)
                story = "; ".join(f"{event.at:.1f} {event.kind}: {event.reason}" for event in events)
                refused_at = [event.at for event in events if event.kind == "rejected"]
                # A refusal whose answer was lost with the service that gave it is asked for again.
                most = 1 + len(refused_at) if self.done["kill"] else 1
                decided = kinds["admitted"] + len(refused_at)
                if not kinds["submitted"] == decided == status.incarnation <= most or kinds["admitted"] > 1:
                    wrong.append(f"{job_id} was not decided on once: {story}")
                elif any(self.there_was_room(job_id, at, rows) for at in refused_at):
                    wrong.append(f"{job_id} was refused, though all that lived then had room beside it: {story}")
                elif status.state == "rejected":
                    self.done["refused"] += 1
                elif status.state == "succeeded" and self.was_silent_too_long(job, status, silences):
                    self.done["late after silence"] += 1
                elif status.state != "succeeded" or status.result is None or not status.result.met:
                    wrong.append(f"{job_id} ({status.deadline_at}) was promised, and not kept: {story}")
                elif status.step != job.length.steps:
                    wrong.append(f"{job_id} made {status.step} steps of {job.length.steps}")
                else:
                    self.done["kept"] += 1
            if self.airflow is not None:
                wrong += self.airflow.judge(client)
            wrong += [f"{job_id} of a burst is lost" for job_id in self.others - rows.keys()]
            problems = "; ".join(client.health().problems)
            if "pass" in problems or "scheduler failed" in problems:
                wrong.append(problems)
        log = self.service.log_file.read_text(errors="replace")
        raised = re.findall(r"^Traceback .*?^[^ \n].*?$", log, flags=re.DOTALL | re.MULTILINE)
        if "Traceback" in log:
            which = Counter(one.splitlines()[-1] for one in raised)
            wrong.append(f"{log.count('Traceback')} tracebacks in the log ({dict(which)}), the first: {raised[:1]}")
        return wrong

    def read_rows(self) -> dict[str, list[Stay]]:
        """All incarnations of each job."""
        engine = sa.create_engine(self.database)
        row = IncarnationRow
        found: dict[str, list[Stay]] = {}
        with engine.connect() as connection:
            for one in connection.execute(sa.select(row.job_id, row.submitted_at, row.finished_at, row.submission)):
                given = readable(one.submission)
                known = one.job_id.startswith(("burst", GOOD))
                most = MOST if given is None else min(NODES * SLOTS, given.max_workers or given.global_batch_size)
                needs = int(not (given and given.best_effort)) if known else max(MOST, most)
                found.setdefault(one.job_id, []).append(Stay(one.submitted_at, one.finished_at, needs))
        engine.dispose()
        return found

    def read_silences(self) -> list[tuple[float, float]]:
        """From when until when the service decided nothing, though it had to."""
        engine = sa.create_engine(self.database)
        decided = sa.select(EventRow.at).where(EventRow.kind.in_(DECISIONS)).order_by(EventRow.at)
        with engine.connect() as connection:
            moments = list(connection.scalars(decided))
        engine.dispose()
        return [(one, other) for one, other in pairwise(moments) if other - one > BREATH_S]

    def was_silent_too_long(self, job: JobSubmission, status: JobStatus, silences: list[tuple[float, float]]) -> bool:
        """Whether a late job's margin was all used up by times in which the service could not decide."""
        if self.is_alone or status.result is None or status.result.met or job.deadline_at is None:
            return False
        since, until = status.submitted_at, job.deadline_at
        return sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in silences) > MARGIN_S

    @staticmethod
    def there_was_room(job_id: str, at: float, rows: dict[str, list[Stay]]) -> bool:
        """Whether each job that lived could have had slots of its own, enough for its promise, and this one, too."""
        taken = sum(
            one.needs
            for other, stays in rows.items()
            for one in stays
            if other != job_id and not one.submitted_at > at and (one.finished_at is None or one.finished_at >= at)
        )
        return taken + 1 <= NODES * SLOTS


class CountingTransport(httpx.AsyncHTTPTransport):
    """Counts what comes back, before a client tries again."""

    def __init__(self, statuses: Counter[int]) -> None:
        super().__init__()
        self._statuses = statuses

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        self._statuses[response.status_code] += 1
        return response


def soak(
    base: Path,
    seconds: float,
    longest_s: float,
    database_url: str | None = None,
    airflow_database: str | None = None,
) -> None:
    """One run: start, let them all loose, look. With a database for it, an Airflow takes part, and all else is idle."""
    seconds = float(os.environ.get("SOAK_S", seconds))
    seed = int(os.environ.get("SOAK_SEED", random.randrange(2**31)))
    print(f"SOAK_S={seconds:g} SOAK_SEED={seed}")
    settings: dict[str, object] = {"virtual_nodes": f"{NODES}x{SLOTS}", "deadline_margin_s": MARGIN_S}
    if database_url is not None:
        settings["database_url"] = database_url
    service, airflow = Served(base / "state", settings), None
    code = base / "code"
    code.mkdir()
    (code / "train.py").write_text("print('training')\n")
    try:
        service.start()
        snapshot = snapshot_folder(code)
        with ElasticFlowClient(service.endpoint) as client:
            client.upload_snapshot(snapshot)
        database = database_url or f"sqlite:///{service.state_dir / 'elasticflow.db'}"
        if airflow_database is not None:
            airflow = SoakedAirflow(service.endpoint, airflow_database, f"{GOOD}flow")
        run = Soak(
            service,
            database,
            time.monotonic() + seconds,
            random.Random(seed),
            longest_s,
            snapshot.sha256,
            airflow,
            is_alone=airflow is not None,
        )
        asyncio.run(run.run(base))
        if airflow is not None:
            airflow.finish()
        asyncio.run(run.tidy())
        wrong = run.judge()
        print(f"done: {dict(run.done)}; answers: {dict(run.statuses)}; good jobs: {len(run.good)}")
        assert not wrong, f"{len(wrong)} things are wrong:\n" + "\n".join(wrong[:100])
        assert run.done["kept"] >= CLIENTS, "most were refused: this showed nothing"
        assert service.stop() == 0
        assert not service.left_over()
    finally:
        if "SOAK_KEEP" in os.environ:
            shutil.copytree(base, os.environ["SOAK_KEEP"], dirs_exist_ok=True)
        if airflow is not None:
            airflow.close()
        service.end()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_good_jobs_are_kept_whatever_else_happens(tmp_path):
    soak(tmp_path, 200.0, 210.0)  # with later ones, what comes after the load would take as long as the load


@pytest.mark.soak
@pytest.mark.airflow
@pytest.mark.postgres
@pytest.mark.timeout(7200)
def test_good_jobs_are_kept_for_an_hour_on_postgresql(tmp_path, postgres_url, postgres_server):
    soak(tmp_path, 3600.0, 300.0, postgres_url, postgres_server.create_for_airflow("airflow"))

"""The service's connection to one node agent: sends what is to be, and keeps what the node has answered.

Runs in the event loop of ``cluster_nodes.py``, in a thread of its own, and never waits for the engine; the engine reads
the fields of ``NodeLink`` and the files that have arrived, and never waits for a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import math
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from elasticflow_airflow.engines.cluster import job_folder
from elasticflow_airflow.engines.cluster.agent_server import tree_digest
from elasticflow_airflow.engines.cluster.job_folder import Arrivals, Direction, has_ended, is_heartbeat
from elasticflow_airflow.engines.cluster.messages import (
    EnvironmentAnswer,
    EnvironmentRequest,
    FilePart,
    Introduction,
    Probe,
    Pull,
    PullAnswer,
    Push,
    PushAnswer,
    Recall,
    RecallAnswer,
    Seal,
    SupervisorStart,
    SupervisorState,
    introduction_of,
)
from elasticflow_airflow.engines.cluster.recall import Recalled, Taker
from elasticflow_airflow.engines.cluster.shared_storage import StorageProbe
from elasticflow_airflow.engines.local.files import worker_logs
from elasticflow_airflow.engines.local.files.last_read import stamp_of
from elasticflow_airflow.engines.port import Fencing, SupersededError

PULL_WAIT_S = 1.0
"""How long an agent may wait for news at most: a node that lives answers at least this often."""
_ANSWERS_UNTIL_SUSPECTED = 5
"""About so often a node is to answer within the time after which its silence is suspicious."""
_WAY_BACK_S = 0.05
"""Most of a long trip is the agent's wait for news: it reads its clock at the end of that, and answers at once."""
ANSWER_LIMIT_S = 3.0
RETRY_S = 0.3
REFUSED_S = 1.0
"""A file that a node has refused is sent to it again after this time."""
NEW_AGENT_S = 2.0
BATCH_S = 0.01
"""Changes that come within this time are sent together."""
_RECENTLY_S = 15.0
"""Where nothing was sent to a node for so long, its leases are not kept waiting to be renewed."""
_CONNECTIONS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=4.0)
"""Closed when idle before the agent does so, after five seconds: a closing one would fail the next request."""
PUSH_BYTES = 4 << 20
PART_BYTES = 256 * 1024
CODE_LIMIT_S = 120.0
_TOO_OLD = "its agent cannot install packages: install the version of this package there that the service has"
_TELLS_NO_LEADER = (
    "its agent cannot tell a service that has taken over what runs there: install the version of this package there"
    " that the service has, and start the agent again; its workers train on meanwhile, until their lease ends"
)
ENVIRONMENT_KNOWN_S = 60.0
"""For so long a node is not asked again for an environment that it has."""

logger = logging.getLogger("elasticflow.node")


@dataclass(slots=True)
class _Environment:
    """What a node has last said of an environment."""

    answer: EnvironmentAnswer = field(default_factory=EnvironmentAnswer)
    at_s: float = 0.0
    is_asked: bool = False
    """Whether a question is under way."""


@dataclass(slots=True)
class _Wanted:
    """What the engine has asked for since the last push."""

    incarnations: set[str] = field(default_factory=set)
    """Those whose files may have changed."""
    renewed: set[str] = field(default_factory=set)
    renewed_jobs: set[str] = field(default_factory=set)
    leaving_jobs: set[str] = field(default_factory=set)

    def add(self, other: _Wanted) -> None:
        """Add what was asked for before and could not be sent."""
        self.incarnations |= other.incarnations
        self.renewed |= other.renewed
        self.renewed_jobs |= other.renewed_jobs
        self.leaving_jobs |= other.leaving_jobs


class _NotRecalledError(Exception):
    """The node answers, and cannot tell what it has: until it can, nothing is known of its jobs, and nothing sent."""


class NodeLink:
    """One node agent. ``on_across`` is called for a file that arrived and that other nodes need, too.

    ``suspicion_s``: after how long without an answer the node is given up.

    ``key``: stays the same when the agent comes again at another address. ``on_introduced`` may refuse an agent by
    ValueError.

    ``fencing`` gives the number of each request; the agent refuses lower ones than it has seen. ``code_root``: below it
    is the code of jobs. ``prepare`` None: what is in ``root`` is all there is to know of the node's jobs. Otherwise
    nothing is sent until the node has told what it has, and ``prepare`` makes the folder of an incarnation for that.
    All methods without ``async`` may be called in any thread.
    """

    def __init__(
        self,
        key: str,
        url: str,
        token: str,
        root: Path,
        fencing: Fencing,
        probe: StorageProbe,
        on_across: Callable[[NodeLink, str], None],
        on_introduced: Callable[[NodeLink, Introduction], None],
        arrivals: Arrivals,
        suspicion_s: float,
        code_root: Path | None = None,
        prepare: Callable[[str], None] | None = None,
    ) -> None:
        self.key, self.url, self._root, self._fencing, self._probe = key, url, root, fencing, probe
        self._on_across, self._on_introduced, self._arrivals = on_across, on_introduced, arrivals
        self._code_root, self._prepare = root if code_root is None else code_root, prepare
        self._wait_s = min(PULL_WAIT_S, suspicion_s / _ANSWERS_UNTIL_SUSPECTED)
        self._turn_s = suspicion_s / 2 * zlib.crc32(key.encode()) / 2**32
        """How long renewed leases wait, so that not all nodes are told in the same moment."""
        self._pushed_s = -math.inf
        """When something was sent last (monotonic)."""
        self._turn: asyncio.TimerHandle | None = None
        """Ends the wait of renewed leases."""
        self._known_version = 0
        """What had changed up to then at the node is known when it has been introduced."""
        self.was_recalled = prepare is None
        """Whether all is here that the node had of jobs before."""
        self._seal = Seal(token)
        headers = {"Authorization": f"Bearer {token}"}
        self._client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=ANSWER_LIMIT_S, limits=_CONNECTIONS, trust_env=False
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._known_path = root / "nodes" / f"{quote(key, safe='')}.json"
        self.introduction = self._known()
        """What the agent has said about itself, now or when the service ran before; None before it ever answered."""
        self._discards_path = self._known_path.with_suffix(".discarded")
        self._discards = set(json.loads(job_folder.read_whole(self._discards_path) or b"[]"))
        """Incarnations that the node has not been told to delete."""
        self._number = time.monotonic_ns()
        """Of the last push: it only grows, also from one object to the next in the same epoch."""
        self._sending: dict[str, asyncio.Future[None]] = {}
        """By folder, code that is being sent."""
        self._complaints: set[str] = set()
        self._refused: set[str] = set()
        """Incarnations of which the node has refused files: these are sent again in a moment."""
        self._connected = self._is_pushing = False
        self.problem: str | None = "it has not answered yet"
        """Why there is no connection, for people; None while there is one."""
        self.answered_s = time.monotonic()
        """When it answered last (monotonic)."""
        self.is_current = False
        """Whether what is known of its slots and supervisors is from after its last silence."""
        self.answers = 0
        self.supervisors: Mapping[str, SupervisorState] = {}
        self.holders: Mapping[str, list[dict[str, Any] | None]] = {}
        self.leaving_at: float | None = None
        """When the machine goes away, by the service's clock (UTC seconds), if that was announced."""
        self._leaving_there: float | None = None
        self.offset_s = 0.0
        """Service's clock minus the node's."""
        self._best_trip_s = float("inf")
        self._sent: dict[str, tuple[int, int, int]] = {}
        """By path, the stamp of the file when it was sent, or for a growing one its size as the last number."""
        self._came: set[str] = set()
        """Files that came from this node: they are not sent back."""
        self._lock = threading.Lock()
        self._wanted = _Wanted()
        self._starts: dict[str, Mapping[str, str]] = {}
        """By folder, the secrets of supervisors that shall be started."""
        self._started: dict[str, int] = {}
        """By folder, the number of answers at which the agent had started it."""
        self._failures: dict[str, str] = {}
        self._environments: dict[str, _Environment] = {}
        """By request, what the node has said of an environment."""

    # -- for the engine

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Its nodes, once it has answered."""
        return () if self.introduction is None else tuple(node.node_id for node in self.introduction.facts.nodes)

    @property
    def silent_s(self) -> float:
        """How long it has not answered, in seconds."""
        return time.monotonic() - self.answered_s

    def mark(self, incarnation: str) -> None:
        """Have the changed files of an incarnation sent."""
        self._want(_Wanted(incarnations={incarnation}))

    def renew(self, folder: str) -> None:
        """Renew the lease of a supervisor."""
        self._want_in_turn(_Wanted(renewed={folder}))

    def renew_job(self, job_id: str) -> None:
        """Renew the leases of all supervisors of a job."""
        self._want_in_turn(_Wanted(renewed_jobs={job_id}))

    def ask_to_leave(self, job_id: str) -> None:
        """Make all supervisors of a job save and leave."""
        self._want(_Wanted(leaving_jobs={job_id}))

    def discard(self, incarnation: str) -> None:
        """Have the files of an incarnation deleted, except its checkpoints; noted on disk until the node knows."""
        with self._lock:
            self._discards.add(incarnation)
            self._keep_discards()
        self._want(_Wanted())

    def start(self, folder: str, secret_env: Mapping[str, str]) -> str | None:
        """Have a supervisor started, unless it is coming up; return why it was not at the last attempt, if so."""
        failure = self._failures.pop(folder, None)
        if failure is None and not self.is_coming_up(folder):
            with self._lock:
                self._starts[folder] = secret_env
            self.mark(job_folder.incarnation_of(folder))
        return failure

    def is_coming_up(self, folder: str) -> bool:
        """Return whether a supervisor is being started, or was started and has not written a status yet."""
        known = self.supervisors.get(folder)
        # One that is alive has written a status, which has not come here yet.
        if folder in self._starts or (known is not None and known.is_running):
            return True
        # The answer that was under way when it was started does not know of it yet.
        started = self._started.get(folder)
        return started is not None and self.answers < started + 2

    def state_of(self, folder: str) -> SupervisorState:
        """Return the last known state of a supervisor that has written a status, and has not ended."""
        # The agent tells of each until it has ended; one of which it knows nothing was lost with its folder.
        return self.supervisors.get(folder, SupervisorState.DEAD)

    async def ask_for_stacks(self, trainers: Mapping[str, tuple[Mapping[str, Any] | None, str]], limit_s: float) -> Any:
        """Return the stacks of trainers there. Raises httpx.HTTPError."""
        return _checked(await self._client.post("/stacks", json={"trainers": trainers}, timeout=limit_s)).json()

    def environment(self, asked: EnvironmentRequest) -> EnvironmentAnswer:
        """Return what the node has last said of an environment, and ask again, if that may have changed."""
        key = asked.model_dump_json()
        known = self._environments.setdefault(key, _Environment())
        fresh = known.answer.failure or (known.answer.ready and time.monotonic() - known.at_s < ENVIRONMENT_KNOWN_S)
        if not fresh and not known.is_asked and self._loop is not None:
            known.is_asked = True
            asyncio.run_coroutine_threadsafe(self._ask_for_environment(key, known), self._loop)
        return known.answer

    def forget_environment(self, asked: EnvironmentRequest) -> None:
        """Forget what the node has said of an environment: it is to try again."""
        self._environments.pop(asked.model_dump_json(), None)

    async def _ask_for_environment(self, key: str, known: _Environment) -> None:
        try:
            known.answer = EnvironmentAnswer.model_validate_json(await self._post("/environment", key))
            known.at_s = time.monotonic()
        except (httpx.HTTPError, ValueError) as error:
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == HTTPStatus.NOT_FOUND:
                known.answer = EnvironmentAnswer(failure=_TOO_OLD)
                return
            self._complain_of("an environment for requirements=", error)
            await asyncio.sleep(RETRY_S)
        finally:
            known.is_asked = False

    def _want(self, wanted: _Wanted) -> None:
        with self._lock:
            self._wanted.add(wanted)
        # Where it is set, what is wanted has not been taken yet.
        if self._loop is not None and not self._wake.is_set():
            with contextlib.suppress(RuntimeError):  # The loop has just been closed.
                self._loop.call_soon_threadsafe(self._wake.set)

    def _want_in_turn(self, renewals: _Wanted) -> None:
        """Have leases renewed in a moment that differs from node to node; at once if nothing was sent for a while."""
        if time.monotonic() - self._pushed_s > _RECENTLY_S:
            self._want(renewals)
            return
        with self._lock:
            self._wanted.add(renewals)
        # As long as its turn is to come, what is wanted has not been taken yet.
        if self._loop is not None and self._turn is None and not self._wake.is_set():
            with contextlib.suppress(RuntimeError):  # The loop has just been closed.
                self._loop.call_soon_threadsafe(self._await_turn)

    def _await_turn(self) -> None:
        if self._loop is not None and self._turn is None:
            self._turn = self._loop.call_later(self._turn_s, self._wake.set)

    # -- the two conversations

    def move_to(self, url: str) -> None:
        """Go on at another address of the agent; called in the event loop."""
        self.url = url
        self._client.base_url = url
        self._connected = False

    async def run(self) -> None:
        """Converse with the agent until cancelled."""
        self._loop = asyncio.get_running_loop()
        self._wake.set()
        async with self._client:
            await asyncio.gather(self._pull_for_ever(), self._push_for_ever())

    async def flush(self) -> None:
        """Wait until everything wanted so far has been sent."""
        self._wake.set()
        while self._is_pushing or self._wanted != _Wanted() or self._starts:
            await asyncio.sleep(BATCH_S)

    async def _pull_for_ever(self) -> None:
        version, sizes = 0, dict[str, int]()
        while True:
            tried_s = time.monotonic()
            try:
                if not self._connected:
                    await self._introduce()
                    version, sizes = self._known_version, await asyncio.to_thread(self._sizes_here)
                asked_s, begun_s = time.time(), time.monotonic()
                wait_s = self._wait_s if self.is_current else 0.0
                request = Pull(epoch=self._fencing.epoch(), version=version, sizes=sizes, wait_s=wait_s)
                answer = PullAnswer.model_validate_json(await self._post("/pull", request.model_dump_json()))
                if answer.instance != self._instance:
                    self._connected = False  # It was started again, and may know nothing.
                    continue
                self.answered_s = time.monotonic()
                self._compare_clocks(asked_s, self.answered_s - begun_s, answer.now_s)
                self._take(answer)
                version = answer.version
                sizes = {file.path: self._size_after(file) for file in answer.files if file.offset is not None}
            except Exception as error:  # noqa: BLE001  (whatever it is, this node is tried again, and the others go on)
                self._complain(error)
                # An agent is exchanged by people; each try writes to the shared storage.
                pause_s = NEW_AGENT_S if isinstance(error, _NotRecalledError) else RETRY_S
                if isinstance(error, SupersededError | _NotRecalledError):  # It is not the node that is silent.
                    self.answered_s += time.monotonic() - tried_s + pause_s
                await asyncio.sleep(pause_s)

    async def _push_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(BATCH_S)
            self._wake.clear()
            if self._turn is not None:
                self._turn.cancel()
                self._turn = None
            if not self._connected:
                await asyncio.sleep(RETRY_S)
                self._wake.set()
                continue
            try:
                self._is_pushing = True
                await self._push()
            except Exception as error:  # noqa: BLE001
                self._complain(error)
                await asyncio.sleep(RETRY_S)
                self._wake.set()
            finally:
                self._is_pushing = False

    async def _introduce(self) -> None:
        asked_s, begun_s = time.time(), time.monotonic()
        answer = _checked(await self._client.get("/introduction"))
        found = introduction_of(answer.json())
        took_s = time.monotonic() - begun_s
        self._on_introduced(self, found)
        await self._post("/probe", Probe(name=self._probe.name, content=self._probe.content).model_dump_json())
        await asyncio.to_thread(self._probe.check_answer, found.instance)
        if found.epoch > self._fencing.epoch():
            self._fencing.above(found.epoch)
        self._best_trip_s = float("inf")
        self._compare_clocks(asked_s, took_s, found.now_s)
        if self.introduction is None or found.facts.nodes != self.introduction.facts.nodes:
            self.is_current = False  # Otherwise only the agent was exchanged: that alone is no silence of the node.
        self._sent.clear()
        self._came.clear()
        self._started.clear()
        self._known_version = 0
        if not self.was_recalled:
            self.introduction = found  # Whose node it is counts, also where it cannot tell what it has.
            await self._recall(found)
            self.was_recalled = True
        job_folder.write_whole(self._known_path, found.model_dump_json().encode())
        self.introduction, self._connected = found, True
        self._arrivals.note_all()
        self._wake.set()

    async def _recall(self, introduction: Introduction) -> None:
        """Take what the node has of jobs into our folder. Raises what a request raises, and _NotRecalledError."""
        after: str | None = ""
        while after is not None:
            asked = Recall(epoch=self._fencing.epoch(), after=after).model_dump_json()
            try:
                answer = RecallAnswer.model_validate_json(await self._post("/recall", asked))
            except httpx.HTTPStatusError as error:
                if error.response.status_code == HTTPStatus.NOT_FOUND:
                    raise _NotRecalledError(_TELLS_NO_LEADER) from error
                raise
            if answer.instance != introduction.instance:
                raise ValueError("the agent was started again")
            await asyncio.to_thread(self._take_recalled, answer, introduction)
            after, self._known_version = answer.last, answer.version

    def _take_recalled(self, answer: RecallAnswer, introduction: Introduction) -> None:
        assert self._prepare is not None
        parts = (*answer.files, *answer.copies)
        for incarnation in {*answer.ended, *(job_folder.incarnation_of(part.path) for part in parts)}:
            if job_folder.place_of(f"{incarnation}/session.json") is not None:
                self._prepare(incarnation)
        taker = Taker(
            root=self._root,
            code_root=self._code_root,
            facts=introduction.facts,
            with_our_time=lambda beat: with_time(beat, self.offset_s),
            complain=self._complain_of,
        )
        for path, stamp in taker.take(Recalled(answer.files, answer.copies)).items():
            place = job_folder.place_of(path)
            if place is not None and place.worker_id is not None:
                self._came.add(path)
            else:
                self._sent[path] = stamp
        for copy in answer.copies:
            if copy.offset is not None:  # What follows is sent.
                self._sent[copy.path] = (0, 0, len(copy.data))

    def _sizes_here(self) -> dict[str, int]:
        """Return how much of growing files has arrived before, for the supervisors that may not have ended."""
        found: dict[str, int] = {}
        for incarnation in job_folder.unfinished(self._root, self.node_ids, has_ended):
            for path in job_folder.files_up(self._root, incarnation, self.node_ids):
                place = job_folder.place_of(path)
                if place is not None and place.grows:
                    found[path] = self._size(path)
        return found

    def _known(self) -> Introduction | None:
        """Return what the agent said when the service ran before: its gangs are on record by the names of its nodes."""
        try:
            return Introduction.model_validate_json(self._known_path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    @property
    def _instance(self) -> str:
        return "" if self.introduction is None else self.introduction.instance

    async def _post(self, path: str, body: str) -> bytes:
        headers = {"Content-Type": "application/json"}
        self._fencing.epoch()  # Whoever may not command asks for nothing, either.
        return _checked(await self._client.post(path, content=body, headers=headers)).content

    def _complain(self, error: Exception) -> None:
        said = str(error) or type(error).__name__
        if said != self.problem:
            logger.warning("node at %s: %s", self.url, said)
        self.problem = said

    # -- up

    def _take(self, answer: PullAnswer) -> None:
        # Whoever reads the files meanwhile finds the status of a supervisor only once it counts as running, and the
        # last status of one that has ended before it counts as dead.
        before = self.supervisors
        running = {folder: state for folder, state in answer.supervisors.items() if state.is_running}
        self.supervisors = {**self.supervisors, **running}
        for file in answer.files:
            try:
                self._take_file(file)
            except Exception as error:  # noqa: BLE001  (a script can have made anything of it: the other files are taken)
                self._complain_of(file.path, error)
            self._arrivals.note_file(file.path)
        self.supervisors, self.holders = answer.supervisors, answer.holders
        if (
            answer.leaving_at != self._leaving_there
        ):  # Compared once, since the clocks' difference is never quite the same.
            self._leaving_there = answer.leaving_at
            self.leaving_at = None if answer.leaving_at is None else answer.leaving_at + self.offset_s
        for folder in [folder for folder, at in self._started.items() if self.answers > at + 2]:
            self._started.pop(folder, None)
        self.answers += 1
        if self.answers == 1:
            self._arrivals.note_all()
        for folder in {*before, *answer.supervisors}:
            if before.get(folder) is not answer.supervisors.get(folder):
                self._arrivals.note(job_folder.incarnation_of(folder))
        self.is_current = True
        if self.problem is not None:
            logger.info("node at %s answers", self.url)
        self.problem = None

    def _take_file(self, file: FilePart) -> None:
        place = job_folder.place_of(file.path)
        if place is None or place.direction is Direction.DOWN or place.node_id not in (None, *self.node_ids):
            raise ValueError("it is none of the node's files")
        path = self._root / file.path
        if not (self._root / place.incarnation).is_dir():
            return  # The job's files were removed.
        if file.offset is not None:
            is_new = file.offset == 0
            job_folder.write_part(path, file.offset, file.data)
            if is_new and place.direction is Direction.UP and place.worker_id is not None:
                # The node keeps as many by itself.
                for _, old in worker_logs.segments(path.parent, place.worker_id)[: -worker_logs.KEEP_SEGMENTS]:
                    old.unlink(missing_ok=True)
        else:
            data = with_time(file, self.offset_s) if is_heartbeat(file.path) else file.data
            if place.direction is Direction.UP or job_folder.read_whole(path) != data:
                job_folder.write_whole(path, data)
        if place.direction is Direction.ACROSS:
            self._came.add(file.path)
            self._on_across(self, file.path)

    def _size(self, path: str) -> int:
        stamp = stamp_of(f"{self._root}/{path}")
        return 0 if stamp is None else stamp[2]

    def _size_after(self, part: FilePart) -> int:
        """Return how much of a growing file need not be sent again: of a removed job's, all that came."""
        arrived = (part.offset or 0) + len(part.data)
        place = job_folder.place_of(part.path)
        is_kept = place is not None and (self._root / place.incarnation).is_dir()
        return self._size(part.path) if is_kept else arrived

    def _compare_clocks(self, asked_s: float, took_s: float, now_s: float) -> None:
        """Keep the comparison of the shortest trip, unless a later one shows that a clock was set."""
        self._best_trip_s *= 1.001  # Clocks drift: a comparison does not count for ever.
        possible = asked_s - now_s <= self.offset_s <= asked_s + took_s - now_s
        if took_s <= self._best_trip_s or not possible:
            self._best_trip_s = took_s
            self.offset_s = asked_s + took_s - min(took_s / 2, _WAY_BACK_S) - now_s

    def _complain_of(self, what: str, error: object) -> None:
        """Log what is wrong with one job's file, once."""
        said = f"{what}: {error or type(error).__name__}"
        if said not in self._complaints and len(self._complaints) < 1000:
            self._complaints.add(said)
            logger.warning("node at %s: %s", self.url, said)

    # -- down

    async def _push(self) -> None:
        with self._lock:
            wanted, self._wanted = self._wanted, _Wanted()
            starts, discards = dict(self._starts), sorted(self._discards)
        stamps: dict[str, tuple[int, int, int]] = {}
        self._number += 1
        try:
            files, postponed = self._parts(wanted, stamps)
            starts = {path: env for path, env in starts.items() if job_folder.incarnation_of(path) not in postponed}
            sealed = [SupervisorStart(path=path, sealed_env=self._seal.close(env)) for path, env in starts.items()]
            epoch = self._fencing.epoch()
            push = Push(
                epoch=epoch,
                number=self._number,
                files=files,
                renewed=sorted(wanted.renewed),
                starts=sealed,
                renewed_jobs=sorted(wanted.renewed_jobs),
                leaving_jobs=sorted(wanted.leaving_jobs),
                discarded=discards,
            )
            if push == Push(epoch=epoch, number=self._number):
                return
            answer = PushAnswer.model_validate_json(await self._post("/push", push.model_dump_json()))
            self._pushed_s = time.monotonic()
            if answer.instance != self._instance:
                raise ValueError("the agent was started again")
        except BaseException:
            self._want(wanted)
            raise
        for path, reason in answer.refused.items():
            self._complain_of(path, reason)
        refused = {job_folder.incarnation_of(path) for path in answer.refused if stamps.pop(path, None) is not None}
        if refused and not self._refused and self._loop is not None:
            self._loop.call_later(REFUSED_S, self._send_again)
        self._refused |= refused
        self._sent |= stamps
        for file in files:
            if file.offset is not None and len(file.data) >= PART_BYTES and file.path not in answer.refused:
                self.mark(job_folder.incarnation_of(file.path))  # There may be more of it.
        self._forget(set(discards))
        self._took_starts(starts, answer)

    def _send_again(self) -> None:
        """Have files sent again that the node has refused."""
        refused, self._refused = self._refused, set()
        self._want(_Wanted(incarnations=refused))

    def _took_starts(self, starts: Mapping[str, Mapping[str, str]], answer: PushAnswer) -> None:
        """Note which supervisors were started, and send the code that others lack."""
        for folder in set(answer.lacking.values()) - self._sending.keys():
            self._sending[folder] = asyncio.ensure_future(self._send_code(folder))
        failures = dict(answer.failures)
        for path, folder in answer.lacking.items():
            task = self._sending.get(folder)
            if task is not None and task.done():
                problem = task.exception()
                if problem is not None:
                    failures[path] = f"its code could not be sent there: {problem or type(problem).__name__}"
        for folder in [folder for folder, task in self._sending.items() if task.done()]:
            del self._sending[folder]
        unfinished = (answer.lacking.keys() | set(answer.waiting)) - failures.keys()
        with self._lock:
            for path, env in starts.items():
                if path not in unfinished and self._starts.get(path) is env:
                    self._started[path] = self.answers  # First: without either it would not seem to come up.
                    del self._starts[path]
            self._failures |= failures
        if unfinished and self._loop is not None:
            self._loop.call_later(RETRY_S, self._wake.set)

    def _forget(self, incarnations: set[str]) -> None:
        """Note that the node deletes incarnations."""
        if incarnations:
            gone = {path for path in self._sent.keys() | self._came if job_folder.incarnation_of(path) in incarnations}
            self._sent = {path: stamp for path, stamp in self._sent.items() if path not in gone}
            self._came -= gone
            with self._lock:
                self._discards -= incarnations
                self._keep_discards()

    def _keep_discards(self) -> None:
        job_folder.write_whole(self._discards_path, json.dumps(sorted(self._discards)).encode())

    def _parts(self, wanted: _Wanted, stamps: dict[str, tuple[int, int, int]]) -> tuple[list[FilePart], set[str]]:
        """Return what has changed in the wanted incarnations, and those for which there was no room any more.

        Notes in ``stamps`` what that will have sent.
        """
        found: list[FilePart] = []
        postponed: set[str] = set()
        room = PUSH_BYTES
        for incarnation in sorted(wanted.incarnations):
            for path in job_folder.files_down(self._root, incarnation, self.node_ids):
                if room <= 0:
                    postponed.add(incarnation)
                    break
                try:
                    part = self._part(path, stamps)
                except Exception as error:  # noqa: BLE001  (this job's own trouble)
                    self._complain_of(path, error)
                    continue
                if part is not None:
                    room -= len(part.data)
                    found.append(part)
        for incarnation in postponed:
            self.mark(incarnation)  # with the next push
        return found, postponed

    def _part(self, path: str, stamps: dict[str, tuple[int, int, int]]) -> FilePart | None:
        """Return what has changed of a file since it was sent; None when nothing has, or it came from there."""
        stamp, place = stamp_of(f"{self._root}/{path}"), job_folder.place_of(path)
        if stamp is None or place is None or path in self._came or self._sent.get(path) == stamp:
            return None
        stamps[path] = stamp
        if place.grows:
            begin = self._sent.get(path, (0, 0, 0))[2]
            data = job_folder.read_part(self._root / path, begin, PART_BYTES)
            stamps[path] = (stamp[0], stamp[1], begin + len(data))
            return FilePart(path=path, data=data, offset=begin) if data else None
        data_or_none = job_folder.read_whole(self._root / path)
        if data_or_none is None:
            return None
        part = FilePart(path=path, data=data_or_none)
        if path.endswith("/session.json"):
            return FilePart(path=path, data=self._session_there(data_or_none))
        return FilePart(path=path, data=with_time(part, -self.offset_s)) if is_heartbeat(path) else part

    def _session_there(self, data: bytes) -> bytes:
        """Return ``session.json`` with the paths that it has on the node."""
        assert self.introduction is not None
        session, facts = json.loads(data), self.introduction.facts
        for name, root in (("incarnation_dir", self._root), ("code_dir", self._code_root)):
            session[name] = facts.path_here(Path(session[name]), root)
        return json.dumps(session, indent=1).encode()

    async def _send_code(self, folder: str) -> None:
        digest = await asyncio.to_thread(tree_digest, self._code_root / folder)
        content = await asyncio.to_thread(_tar_of, self._code_root / folder)
        headers = {"x-digest": digest}
        _checked(await self._client.put(f"/code/{folder}", content=content, headers=headers, timeout=CODE_LIMIT_S))


def _checked(answer: httpx.Response) -> httpx.Response:
    """Return an answer. Raises HTTPStatusError, with what the agent said, for one that is an error."""
    if answer.is_error:
        raise httpx.HTTPStatusError(answer.text[:500], request=answer.request, response=answer)
    return answer


def with_time(file: FilePart, offset_s: float) -> bytes:
    """Return a heartbeat with its time by another clock; as it is when a script has damaged it."""
    try:
        beat = json.loads(file.data)
        return json.dumps({**beat, "at_s": beat["at_s"] + offset_s}).encode()
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return file.data


def _tar_of(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(folder, arcname=".")
    return buffer.getvalue()

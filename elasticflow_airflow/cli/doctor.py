"""``elasticflow doctor``: checks the connection to the service and the service's machine, with remedies.

It also works while the service is unavailable, when it is needed most. It adds the service's own findings.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.text import Text

from elasticflow_airflow import __version__
from elasticflow_airflow.api import API_VERSION, ServiceCard
from elasticflow_airflow.api.diagnosis import Diagnosis, Finding, ok, plural, problem, warning
from elasticflow_airflow.cli.connection import StateDir, Url, chosen, locate
from elasticflow_airflow.cli.terminal.lines import AsJson
from elasticflow_airflow.client import (
    ElasticFlowClient,
    ElasticFlowError,
    Endpoint,
    IncompatibleService,
    JobNotFound,
    ServiceUnavailable,
    Unauthorized,
)
from elasticflow_airflow.client.embedded import did_not_end
from elasticflow_airflow.times import duration

_SKEW_WARNING_S, _SKEW_PROBLEM_S = 2.0, 30.0
_SLOW_ANSWER_S = 1.0
_MARKS = {"ok": ("ok     ", "green"), "warning": ("warning", "yellow"), "problem": ("problem", "bold red")}
_EMBEDDED = "service.sock"


def doctor(
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    as_json: bool = AsJson,
) -> None:
    """Look for problems: connection, versions, slots, torch, disk, clock, DNS, memory; say what to do.

    Ends with status 1 if there is a problem; warnings alone end it with 0.
    """
    findings = list(examine(url, state_dir))
    if as_json:
        import json

        typer.echo(json.dumps([finding.model_dump() for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)


def examine(url: str | None, state_dir: Path | None) -> Iterator[Finding]:
    """Yield the findings of all checks that are possible from this machine."""
    yield ok("client", f"elasticflow-airflow {__version__}, API {API_VERSION}")
    try:
        endpoint = locate(url, state_dir)
    except ElasticFlowError as error:
        yield problem("connection", error.message, error.hint)
        return
    choice = chosen()
    if choice is not None:
        yield from choice.look()
    for replica in endpoint.replicas:
        yield from _look_at_way(replica)
    diagnosis: Diagnosis | None = None
    unseen = ["clock", "slots", "scheduler", "database", "disk", "memory"]
    with ElasticFlowClient(endpoint, retry_for_s=0) as client:
        try:
            if endpoint.other_urls:
                answers = yield from _look_at_replicas(endpoint)
            else:
                yield from _look_at_answer(client)
                answers = 1
            if answers:
                unseen.remove("clock")
            diagnosis = client.doctor()
        except ElasticFlowError as error:
            is_away = isinstance(error, ServiceUnavailable)
            if is_away and endpoint.socket_path is not None and endpoint.socket_path.name == _EMBEDDED:
                yield from _embedded_is_away(endpoint.socket_path, error)
                return
            yield _failure(error)
    if diagnosis is not None:
        yield from diagnosis.findings
    else:
        said = f"of the service were not looked at: {', '.join(unseen)}; only one that answers can tell of them"
        yield warning("service", said, "run this again once what is wrong above is mended")


def _look_at_way(endpoint: Endpoint) -> Iterator[Finding]:
    parts = urlsplit(endpoint.base_url)
    if not endpoint.trust_env:  # one of this machine's own addresses
        return
    if parts.scheme == "http" and endpoint.token:
        remedy = "ELASTICFLOW_TLS_CERT and ELASTICFLOW_TLS_KEY at the service and https in its address, or a TLS proxy"
        yield warning("encryption", f"the token goes to {parts.hostname} in the clear", remedy)
    if endpoint.verify is False and parts.scheme == "https":
        yield warning("encryption", "the service's certificate is not verified", "verify=<path of a CA bundle>")


def _look_at_answer(client: ElasticFlowClient) -> Iterator[Finding]:
    """Ask one address for its version and its clock. Raises ElasticFlowError."""
    asked_at, began_s = time.time(), time.monotonic()
    version = client.version()
    took_s = time.monotonic() - began_s
    yield _connection(client.endpoint, took_s)
    yield _versions(version)
    yield _clock(float(version.get("at", asked_at)), asked_at, took_s)


def _look_at_replicas(endpoint: Endpoint) -> Generator[Finding, None, int]:
    """Ask each address by itself, and compare what is behind them; return how many answer."""
    answering: list[ElasticFlowClient] = []
    with ExitStack() as stack:
        for replica in endpoint.replicas:
            client = stack.enter_context(ElasticFlowClient(replica, retry_for_s=0))
            try:
                for finding in _look_at_answer(client):
                    about = "" if finding.name == "connection" else f"{replica.base_url}: "
                    yield finding.model_copy(update={"message": f"{about}{finding.message}"})
            except ServiceUnavailable as error:
                # The others serve. If there are none, the next call, to all of them, fails, and is a problem.
                yield warning("connection", error.message, error.hint)
            except ElasticFlowError as error:
                yield _failure(error)
            else:
                answering.append(client)
        try:
            yield from _compare(answering)
        except ElasticFlowError as error:
            yield _failure(error)
    return len(answering)


def _compare(clients: Sequence[ElasticFlowClient]) -> Iterator[Finding]:
    """Check that all serve the same jobs, each from a process of its own. Raises ElasticFlowError."""
    if len(clients) < 2:
        if clients:
            said = f"only {clients[0].endpoint.base_url} answers: without it, nobody is asked"
            yield warning("replicas", said, "mend the other addresses, see above")
        return
    processes: dict[tuple[int, float, str], str] = {}
    for client in clients:
        health, url = client.health(), client.endpoint.base_url
        first = processes.setdefault((health.pid, health.started_at, health.state_dir), url)
        if first != url:
            said = f"{first} and {url} lead to the same process: the second adds no safety"
            yield warning("replicas", said, "give the address of each replica itself, or only that of their balancer")
    newest = next(((client, jobs[0]) for client in clients if (jobs := client.list_jobs(limit=1))), None)
    if newest is None:
        yield ok("replicas", f"{len(clients)} addresses answer; whether they are one service, the first job will show")
        return
    source, job = newest  # Replicas have one database: a job that one has told of is known to all others by now.
    strange = [
        client.endpoint.base_url for client in clients if client is not source and not _knows(client, job.job_id)
    ]
    if strange:
        yield problem(
            "replicas",
            f"these are no replicas of one service: job {job.job_id} of {source.endpoint.base_url} is unknown to"
            f" {' and '.join(strange)}",
            "give all replicas the same ELASTICFLOW_DATABASE_URL, and every other service a connection of its own",
        )
    else:
        yield ok("replicas", f"{len(clients)} addresses answer, and know the same jobs")


def _knows(client: ElasticFlowClient, job_id: str) -> bool:
    try:
        client.status(job_id)
    except JobNotFound:
        return False
    return True


def _failure(error: ElasticFlowError) -> Finding:
    """Return the finding of a call that failed."""
    name = "connection"
    if isinstance(error, Unauthorized):
        name = "token"
    elif isinstance(error, IncompatibleService):
        name = "versions"
    return problem(name, error.message, error.hint)


def _connection(endpoint: Endpoint, took_s: float) -> Finding:
    said = f"{endpoint} answered in {took_s * 1000:.0f} ms"
    if took_s > _SLOW_ANSWER_S:
        return warning("connection", said, "is the network, or the service's machine, overloaded?")
    return ok("connection", said)


def _versions(version: dict[str, str]) -> Finding:
    theirs, api = version.get("version", "unknown"), version.get("api", "unknown")
    if api != API_VERSION:
        remedy = "install the same version of elasticflow-airflow for Airflow and for the service"
        return problem("versions", f"the service is {theirs} and speaks API {api}, not {API_VERSION}", remedy)
    if theirs != __version__:
        said = f"the service is {theirs}, this client {__version__}; both speak API {api}"
        return warning("versions", said, "bring both to the same version when it suits you")
    return ok("versions", f"the service is {theirs}, as this client")


def _clock(service_at: float, asked_at: float, took_s: float) -> Finding:
    """Compare the clocks: deadlines are absolute times, which both sides must agree on."""
    # The lower bound of the offset, as the service read its clock some time between request and response.
    off_s = max(0.0, service_at - (asked_at + took_s), asked_at - service_at)
    remedy = "have NTP (chrony, systemd-timesyncd) set the clocks of both machines: deadlines are off by as much"
    if off_s > _SKEW_WARNING_S:
        direction = "ahead of" if service_at > asked_at else "behind"
        make = problem if off_s > _SKEW_PROBLEM_S else warning
        return make("clock", f"the service's clock is {duration(off_s)} {direction} this machine's", remedy)
    return ok("clock", "the service's clock shows the same time as this machine's")


def _embedded_is_away(socket: Path, error: ElasticFlowError) -> Iterator[Finding]:
    """Check this machine in place of an embedded service that does not answer, which by itself is not an error."""
    state_dir = socket.parent
    card = ServiceCard.read(state_dir)
    if card is not None and card.is_expected:
        yield problem("connection", *did_not_end(state_dir, card))
    elif card is not None and socket.exists():
        yield problem("connection", error.message, error.hint)
    else:
        yield ok("connection", f"no service runs for {state_dir} now: the first task that needs it starts it")
    from pydantic import ValidationError

    from elasticflow_airflow.service.http.routes.doctor_routes import look_at_machine, look_at_slots
    from elasticflow_airflow.service.settings import ServiceSettings, problems_of

    try:
        settings = ServiceSettings(state_dir=state_dir)
    except ValidationError as invalid:
        for message in problems_of(invalid):
            yield problem("settings", message, "the service would not start: correct it")
        return
    yield ok("service", "its last pass and its database were not looked at: only a service that runs can tell of them")
    yield ok("clock", "nothing to compare: an embedded service runs on this machine, by its clock")
    yield look_at_slots(settings)
    yield from look_at_machine(settings)


def _print(findings: Sequence[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark, style = _MARKS[finding.level]
        console.print(Text(mark, style=style), Text(f"{finding.name:<{width}}  {finding.message}"))
        if finding.level != "ok":
            console.print(Text(f"        {'':<{width}}  -> {finding.remedy}"))
    counts = {level: sum(finding.level == level for finding in findings) for level in _MARKS}
    if not counts["problem"] and not counts["warning"]:
        console.print(f"all {counts['ok']} checks are well")
    else:
        console.print(plural(counts["problem"], "problem") + ", " + plural(counts["warning"], "warning"))

"""Passes on to the leader what only the process that decides can answer: nodes, logs, plans, forecasts.

Everything else a replica answers itself, from the database. Without a leader it is 503, for some seconds.
"""

from __future__ import annotations

import asyncio
import math
import re
import ssl
from urllib.parse import parse_qs

import httpx
import structlog
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from elasticflow_airflow.service.http.middleware import problem_response
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.leadership.tenure import no_leader

FORWARDED = "x-elasticflow-forwarded"
"""Marks a request that another replica has passed on: it is not passed on again."""
_NEEDS_LEADER = re.compile(
    r"""GET\ /v1/(?:health|capacity|cluster(?:/history)?|jobs/[^/]+/(?:story|logs/[^/]+))
      | POST\ /v1/(?:what-if|forecast|jobs/[^/]+/stacks)
      | PUT\ /v1/nodes/[^/]+/drain""",
    re.VERBOSE,
)
_SUBMIT = re.compile(r"PUT /v1/jobs/[^/]+")
_ANSWERED_ALWAYS = "/v1/health"
"""Without a leader, a replica says at least how itself is."""
_OWN_HEALTH_S = 2.0
"""So long the leader is asked how it is."""
_LOOK_S = 0.25
_PASSED_ON = frozenset({"authorization", "content-type", "accept", "traceparent", "tracestate"})
_ANSWERED = frozenset({"content-type", "retry-after", "link", "cache-control"})
_LIMITS = httpx.Timeout(120.0, connect=2.0)
_CONNECTIONS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=4.0)
"""Closed when idle before the leader does so, after five seconds: a closing one would fail the next request."""

log = structlog.get_logger(__name__)


class Forwarding:
    """Sends a follower's requests to the leader. Inside the token's guard: the leader checks the token again."""

    def __init__(self, app: ASGIApp, parts: ServiceParts) -> None:
        self._app, self._parts = app, parts
        self._client: httpx.AsyncClient | None = None
        self._complained = ""
        """The address of the leader that could not be asked last."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request here, or pass it on."""
        replicas = self._parts.replicas
        if scope["type"] != "http" or replicas is None or self._parts.decides() or not _needs_leader(scope):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        url = None if FORWARDED in headers else replicas.leader_url
        answer = None if url is None else await self._pass_on(url, scope, headers, receive)
        if answer is None and scope["path"] == _ANSWERED_ALWAYS:
            await self._app(scope, receive, send)
            return
        await (answer or problem_response(no_leader()))(scope, receive, send)

    async def _pass_on(self, url: str, scope: Scope, headers: dict[str, str], receive: Receive) -> Response | None:
        """Return the leader's answer; None if it cannot be reached, or does not lead any more."""
        if self._client is None:
            self._client = httpx.AsyncClient(
                timeout=_LIMITS, limits=_CONNECTIONS, trust_env=False, verify=self._trusted()
            )
        kept = {name: value for name, value in headers.items() if name in _PASSED_ON} | {FORWARDED: "1"}
        query = scope["query_string"].decode("latin-1")
        target = f"{url}{scope['raw_path'].decode('latin-1')}{'?' if query else ''}{query}"
        request = self._client.build_request(scope["method"], target, headers=kept, content=await _body_of(receive))
        asking = asyncio.ensure_future(self._client.send(request))
        limit_s = _OWN_HEALTH_S if scope["path"] == _ANSWERED_ALWAYS else math.inf
        try:
            found = await self._while_it_leads(asking, url, limit_s)
        except httpx.HTTPError as error:
            self._complain(url, str(error) or type(error).__name__)
            return None
        self._complained = ""
        if found is None:
            return None
        if found.status_code == httpx.codes.SERVICE_UNAVAILABLE and '"no_leader"' in found.text:
            return None
        given = {name: value for name, value in found.headers.items() if name in _ANSWERED}
        return Response(found.content, found.status_code, given)

    def _complain(self, url: str, problem: str) -> None:
        """Log why the leader cannot be asked, once until it can: clients ask again and again."""
        if self._complained != url:
            log.warning("the leader cannot be asked", url=url, problem=problem)
        self._complained = url

    def _trusted(self) -> ssl.SSLContext:
        """Return whom to believe: the usual authorities, and the certificate that all replicas have."""
        context = ssl.create_default_context()
        if self._parts.settings.tls_cert is not None:
            context.load_verify_locations(self._parts.settings.tls_cert)
        return context

    async def _while_it_leads(
        self, asking: asyncio.Future[httpx.Response], url: str, limit_s: float
    ) -> httpx.Response | None:
        """Wait for an answer as long as the one that was asked leads: one that stands still answers after minutes."""
        waited_s = 0.0
        try:
            while not asking.done() and waited_s < limit_s:
                await asyncio.wait([asking], timeout=_LOOK_S)
                waited_s += _LOOK_S
                replicas = self._parts.replicas
                if not asking.done() and (replicas is None or replicas.leader_url != url):
                    return None
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()


def _needs_leader(scope: Scope) -> bool:
    asked = f"{scope['method']} {scope['path']}"
    if _NEEDS_LEADER.fullmatch(asked) is not None:
        return True
    dry = parse_qs(scope["query_string"].decode("latin-1")).get("dry_run", ["false"])[-1]
    return _SUBMIT.fullmatch(asked) is not None and dry.lower() in ("true", "1", "on", "yes", "t", "y")


async def _body_of(receive: Receive) -> bytes:
    parts: list[bytes] = []
    more = True
    while more:
        message: Message = await receive()
        if message["type"] != "http.request":
            break
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)

"""One call of the HTTP API as a value: what to send, and how to read the response. Sends nothing itself.

``service_method`` turns a function that builds such a value into a method of every client. So each call is written
once, and the blocking and the async client cannot differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Param = str | int | float | tuple[str, ...]
"""Value of a query parameter; a tuple repeats the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request and the reader of its response. ``missing`` reads a 404 where that is a result, not an error."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    params: Mapping[str, Param] = field(default_factory=dict)
    body: bytes | None = field(default=None, repr=False)
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    missing: Callable[[httpx.Response], T] | None = None


class BlockingCaller:
    """Base class of clients whose methods return the result."""


class AsyncCaller:
    """Base class of clients whose methods return a coroutine of the result."""


class UnsentCaller:
    """Base class of objects whose methods return the call itself."""


class service_method(Generic[P, T]):  # noqa: N801 - used as a decorator, like property
    """Decorates a function that builds a call. On a client, the method sends the call and returns its result.

    The blocking client returns the result, the async client a coroutine of it, and ``UnsentCalls`` the call itself.
    Each client class implements this in its ``_method_of``.
    """

    def __init__(self, build: Callable[Concatenate[Any, P], Call[T]]) -> None:
        self._build = build
        self.__doc__ = build.__doc__
        signature = inspect.signature(build)
        answer = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
        # help() shows what a client's method returns.
        setattr(build, "__signature__", signature.replace(return_annotation=answer))  # noqa: B010 - mypy knows no such

    @overload
    def __get__(self, client: BlockingCaller, owner: Any = None) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncCaller, owner: Any = None) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: UnsentCaller, owner: Any = None) -> Callable[P, Call[T]]: ...
    @overload
    def __get__(self, client: None, owner: type[BlockingCaller]) -> Callable[Concatenate[BlockingCaller, P], T]: ...
    @overload
    def __get__(
        self, client: None, owner: type[AsyncCaller]
    ) -> Callable[Concatenate[AsyncCaller, P], Coroutine[Any, Any, T]]: ...
    def __get__(self, client: Any, owner: Any = None) -> Any:
        method = owner._method_of(self._build)
        return method if client is None else method.__get__(client, owner)


def job_path(job_id: str) -> str:
    """Return the URL path of a job."""
    return f"/v1/jobs/{quote(job_id, safe='')}"


def reader(model: type[M]) -> Callable[[httpx.Response], M]:
    """Return a reader of a single value; fields that a newer service adds are dropped."""
    return lambda response: model.model_validate_json(response.content, extra="ignore")


def list_reader(model: type[M]) -> Callable[[httpx.Response], list[M]]:
    """Return a reader of a list of values; fields that a newer service adds are dropped."""
    adapter = TypeAdapter(list[model])  # type: ignore[valid-type]  # mypy takes no variable for a type
    return lambda response: adapter.validate_json(response.content, extra="ignore")

"""Two stacks, each started once: on SQLite for all paths, on PostgreSQL for those where the database matters."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Literal

import pytest
from support.airflow_paths import PATHS
from support.airflow_stack import Stack, close_stack, open_stack
from support.postgres import postgres


def as_long_as_wanted(*, config: pytest.Config, **_: object) -> Literal["module", "session"]:
    """How long a stack lives. Several processes would keep one each to the end of a soak, which needs the machine."""
    return "module" if config.getoption("markexpr") == "soak" else "session"


@pytest.fixture(scope=as_long_as_wanted)
def sqlite_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Airflow and the services on SQLite."""
    opened = open_stack(PATHS.dag_file(), len(PATHS.dags))
    yield opened
    close(opened, request)


@pytest.fixture
def stack(sqlite_stack: Stack) -> Stack:
    """The usual one."""
    return sqlite_stack


@pytest.fixture(scope=as_long_as_wanted)
def postgres_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Airflow and the service on databases of a real PostgreSQL."""
    with postgres() as server:
        database, name = server.create_for_airflow(f"airflow{uuid.uuid4().hex}"), f"service{uuid.uuid4().hex}"
        server.sql(f"CREATE DATABASE {name}")
        service_database = server.url.format(name).replace("postgresql:", "postgresql+psycopg:")
        opened = open_stack(PATHS.dag_file(), len(PATHS.dags), database=database, service_database=service_database)
        opened.database = server
        yield opened
        close(opened, request)


def close(stack: Stack, request: pytest.FixtureRequest) -> None:
    if request.session.testsfailed:
        print(stack.tails())
    close_stack(stack)

"""Two stacks, each started once: on PostgreSQL, as teams run Airflow, and for the long tests also on SQLite."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Literal

import pytest
from support.airflow_paths import PATHS
from support.airflow_stack import Stack, close_stack, open_stack
from support.postgres import postgres, why_not


def as_long_as_wanted(*, config: pytest.Config, **_: object) -> Literal["module", "package"]:
    """How long a stack lives: all tests of this folder share it. In a soak several processes would keep one each."""
    return "module" if config.getoption("markexpr") == "soak" else "package"


@pytest.fixture(scope=as_long_as_wanted)
def sqlite_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Airflow and the services on SQLite."""
    opened = open_stack(PATHS.dag_file(), len(PATHS.dags))
    yield opened
    close(opened, request)


@pytest.fixture(scope=as_long_as_wanted)
def usual_stack(request: pytest.FixtureRequest) -> Stack:
    """The one on PostgreSQL; on a machine without it, the other."""
    found: Stack = request.getfixturevalue("sqlite_stack" if why_not() else "postgres_stack")
    return found


@pytest.fixture
def stack(usual_stack: Stack) -> Stack:
    """Where the tests go on that choose none."""
    return usual_stack


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

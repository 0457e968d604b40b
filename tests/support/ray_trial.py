"""A real service over a Ray cluster of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from support.node_agents import TOKEN
from support.ray_machines import RayMachines
from support.trial import Trial

AnyTrial = TypeVar("AnyTrial", bound=Trial)


@contextmanager
def on_ray(
    trial: AnyTrial, machines: RayMachines, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> Iterator[AnyTrial]:
    """Have a trial's service use the cluster of these machines, and end them, with all that is left, afterwards."""
    for name, value in machines.ray_env.items():
        monkeypatch.setenv(name, value)
    base = trial.state_dir.parent
    trial.settings = {
        "engine": "ray",
        "ray_address": machines.address,
        "ray_reserved": True,
        "node_folder": base / "nodes",
        "shared_dir": base / "shared",
        "node_token": TOKEN,
        **settings,
    }
    try:
        yield trial
    finally:
        machines.close()
    trial.end()

"""A real service over a Ray cluster of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from support.node_agents import TOKEN
from support.ray_machines import RayMachines
from support.trial import Trial

AnyTrial = TypeVar("AnyTrial", bound=Trial)


def settings_for(machines: RayMachines, base: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return the settings of a service that uses the cluster of these machines; it finds Ray's token, too."""
    for name, value in machines.ray_env.items():
        monkeypatch.setenv(name, value)
    return {
        "engine": "ray",
        "ray_address": machines.address,
        "ray_reserved": True,
        "node_folder": base / "nodes",
        "shared_dir": base / "shared",
        "node_token": TOKEN,
    }


@contextmanager
def on_ray(
    trial: AnyTrial, machines: RayMachines, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> Iterator[AnyTrial]:
    """Have a trial's service use the cluster of these machines, and end them, with all that is left, afterwards."""
    trial.settings = {**settings_for(machines, trial.state_dir.parent, monkeypatch), **settings}
    try:
        yield trial
    finally:
        machines.close()
    trial.end()

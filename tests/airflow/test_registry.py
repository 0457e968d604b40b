"""What a registry shows of this package is there: every name can be imported, nothing of the provider is left out."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import yaml

from elasticflow_airflow.provider_info import get_provider_info

REGISTRY = yaml.safe_load((Path(__file__).resolve().parents[2] / ".airflow-registry.yaml").read_text())
KINDS = ("operators", "sensors", "hooks", "triggers")


def test_every_name_can_be_imported() -> None:
    for kind in (*KINDS, "other"):
        for entry in REGISTRY[kind]:
            module, name = entry["module"].rsplit(".", 1)
            assert getattr(import_module(module), name).__name__ == name
            assert entry["description"]


def test_nothing_is_left_out() -> None:
    info = get_provider_info()
    assert REGISTRY["package-name"] == info["package-name"]
    assert REGISTRY["display-name"] == info["name"]
    for kind in KINDS:
        modules = {module for group in info.get(kind, []) for module in group["python-modules"]}
        assert modules == {entry["module"].rsplit(".", 1)[0] for entry in REGISTRY[kind]}, kind
    others = {entry["module"] for entry in REGISTRY["other"]}
    assert others == {*info["notifications"], *(one["class-name"] for one in info["task-decorators"])}

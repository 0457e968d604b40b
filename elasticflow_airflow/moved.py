"""Keeps import paths of earlier releases working: each resolves to the module that replaced it.

They are needed by users' own code, by paths that were stored or passed on, and by ``python -m`` of processes that are
still running. Importing a path that the documentation once named warns once. Workers of a release without this table
find ``runtime/checkpoint.py`` and others as files. The package itself imports this module, so it imports next to
nothing.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

_PACKAGE = __name__.rpartition(".")[0]
MOVED = {
    "calendar_feed": "recurring.calendar_feed",
    "diagnosis": "api.diagnosis",
    "engines.local.supervisor": "engines.local.workers.supervisor",
    "insight": "api.insight",
    "listeners": "task.acknowledging",
    "runtime.aiming": "runtime.gang.handover",
    "runtime.checkpointer": "runtime.checkpoints.checkpointer",
    "runtime.container": "runtime.stores.file_format",
    "runtime.data": "runtime.samples.sample_order",
    "runtime.devices": "runtime.stepping.devices",
    "runtime.fetching": "runtime.samples.fetching",
    "runtime.forkserver": "runtime.process.forkserver",
    "runtime.group": "runtime.gang.process_group",
    "runtime.imports": "runtime.process.imports",
    "runtime.interval": "runtime.checkpoints.interval",
    "runtime.length_groups": "runtime.samples.length_groups",
    "runtime.lightning_limits": "runtime.frameworks.lightning_limits",
    "runtime.lightning_notes": "runtime.frameworks.lightning_notes",
    "runtime.logical": "runtime.logical_workers",
    "runtime.machinery": "runtime.stepping.gradient_step",
    "runtime.measuring": "runtime.stepping.measuring",
    "runtime.meeting": "runtime.gang.handover",
    "runtime.meeting_store": "runtime.gang.meeting_store",
    "runtime.membership": "runtime.gang.membership",
    "runtime.neighbour": "runtime.gang.neighbour_memory",
    "runtime.opening": "runtime.stores.open_store",
    "runtime.reduction": "runtime.stepping.reduction",
    "runtime.resume": "runtime.gang.resume",
    "runtime.retrying": "runtime.stores.retrying",
    "runtime.room": "runtime.stores.disk_space",
    "runtime.running_statistics": "runtime.stepping.running_statistics",
    "runtime.saving": "runtime.checkpoints.saving",
    "runtime.shim": "runtime.process.parent_tie",
    "runtime.snapshot": "runtime.checkpoints.state_copy",
    "runtime.stacks": "runtime.process.stacks",
    "runtime.state": "runtime.checkpoints.state_tree",
    "runtime.step": "runtime.stepping.optimizer_step",
    "runtime.storage": "runtime.stores.store",
    "runtime.stream_checks": "runtime.samples.stream_checks",
    "runtime.streams": "runtime.samples.streams",
    "runtime.target": "runtime.stepping.loss_target",
    "runtime.tensor_bytes": "runtime.checkpoints.tensor_bytes",
    "runtime.trainer_limits": "runtime.frameworks.trainer_limits",
    "runtime.trainer_loss": "runtime.frameworks.trainer_loss",
    "runtime.trainer_progress": "runtime.frameworks.trainer_progress",
    "runtime.trainer_world": "runtime.frameworks.trainer_world",
    "runtime.transfer": "runtime.gang.transfer",
    "runtime.watching": "runtime.gang.watching",
    "runtime.writer": "runtime.checkpoints.writer",
    "runtime.writer_process": "runtime.checkpoints.writer_process",
    "runtime.zygote": "runtime.process.zygote",
    "service.openapi": "service.http.openapi",
    "training_options": "api.training_options",
    "wire": "api",
    "wire.base": "api.base",
    "wire.card": "api.service_card",
    "wire.event_kinds": "api.event_kinds",
    "wire.fields": "api.fields",
    "wire.forecast": "api.forecast",
    "wire.owners": "api.owners",
    "wire.status": "api.status",
    "wire.submission": "api.submission",
}
"""Old to new module path, both relative to the package."""

_WARNED = ("calendar_feed", "insight", "wire")


class MovedModules(MetaPathFinder):
    """Meta path finder for the module paths of earlier releases."""

    def find_spec(self, fullname: str, _path: object = None, _target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a module that has moved; None for all others."""
        package, _, name = fullname.partition(".")
        if package != _PACKAGE or name not in MOVED:
            return None
        there = find_spec(f"{_PACKAGE}.{MOVED[name]}")
        if there is None or not isinstance(there.loader, InspectLoader):
            return None
        return ModuleSpec(fullname, _Alias(there.name, there.loader), origin=there.origin, is_package=name == "wire")


class _Alias(InspectLoader):
    """Loads a module under its old name: the same object, or its code when run by ``python -m``."""

    def __init__(self, now: str, loader: InspectLoader) -> None:
        self._now, self._loader = now, loader

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module that the import system has created by the current module."""
        old = module.__name__
        if old.removeprefix(f"{_PACKAGE}.") in _WARNED:
            warnings.warn(f"{old} is {self._now} now", DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(self._now)

    def get_code(self, _fullname: str) -> CodeType | None:
        """Return the code of the current module."""
        return self._loader.get_code(self._now)

    def get_source(self, _fullname: str) -> str | None:
        """Return the source of the current module."""
        return self._loader.get_source(self._now)

    def is_package(self, _fullname: str) -> bool:
        """Whether the current module is a package."""
        return self._loader.is_package(self._now)

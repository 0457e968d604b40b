"""Support for processes of an earlier release that import modules after an upgrade has replaced the package's folder.

A trainer that has begun keeps its loaded modules, and new modules that it imports must work with them. A fork of a
process that has only preloaded modules (the fork server, the warm pool) unloads those it has not used, and imports all
of them again. May import the standard library only.
"""

from __future__ import annotations

import sys

_RUNTIME = "elasticflow_airflow.runtime"
_KEPT = {"manifest": "stores.manifest", "retrying": "stores.retrying", "storage": "stores.store"}
"""Old modules whose classes must keep their identity in a running trainer, with their current names."""
_ONLY_BEFORE = "machinery"
"""Module that every session of earlier releases imported, and that no longer exists."""
_IN_USE = (_RUNTIME, f"{_RUNTIME}.bootstrap", f"{_RUNTIME}.transformers", f"{_RUNTIME}.lightning", __name__)
"""Modules in use before a process has a session, and the modules that call this one."""


def keep() -> None:
    """Register loaded old modules under their new names, for new modules to import; do nothing if there are none."""
    for old, new in _KEPT.items():
        if _is_there(old):
            sys.modules.setdefault(f"{_RUNTIME}.{new}", sys.modules[f"{_RUNTIME}.{old}"])


def forget_if_unused() -> None:
    """Unload an earlier release's session modules if no session has begun. Raises ImportError if one has."""
    if not _is_there(_ONLY_BEFORE):
        return
    if getattr(sys.modules.get(f"{_RUNTIME}.bootstrap"), "session_initialised", False):
        raise ImportError("elasticflow-airflow was upgraded while this script ran: import it before runtime.init()")
    for name in [name for name in sys.modules if name.startswith(f"{_RUNTIME}.") and name not in _IN_USE]:
        del sys.modules[name]


def _is_there(old: str) -> bool:
    """Return whether the old module itself is loaded, not a current module under the old name."""
    module = sys.modules.get(f"{_RUNTIME}.{old}")
    return module is not None and module.__name__ == f"{_RUNTIME}.{old}"

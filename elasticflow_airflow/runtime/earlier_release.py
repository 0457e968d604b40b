"""For processes of an earlier release that import late from this one, whose folder has taken the other's place.

A trainer that has begun keeps what it has: new modules that it asks for work with the old ones that it knows. A fork of
a process that has only prepared itself (the fork server, the warm pool) forgets what it has not used, and imports all
of it anew. May import the standard library only.
"""

from __future__ import annotations

import sys

_RUNTIME = "elasticflow_airflow.runtime"
_KEPT = {"manifest": "stores.manifest", "retrying": "stores.retrying", "storage": "stores.store"}
"""Old modules whose classes a running trainer tells apart, and what they are called now."""
_ONLY_BEFORE = "machinery"
"""Every session imported it, and no release does any more."""
_IN_USE = (_RUNTIME, f"{_RUNTIME}.bootstrap", f"{_RUNTIME}.transformers", f"{_RUNTIME}.lightning", __name__)
"""What a process uses before it has a session, and who asks."""


def keep() -> None:
    """Let new modules find the old ones in memory, where a process has them; else do nothing."""
    for old, new in _KEPT.items():
        if _is_there(old):
            sys.modules.setdefault(f"{_RUNTIME}.{new}", sys.modules[f"{_RUNTIME}.{old}"])


def forget_if_unused() -> None:
    """Forget an earlier release's session that nobody has begun. Raises ImportError where somebody has."""
    if not _is_there(_ONLY_BEFORE):
        return
    if getattr(sys.modules.get(f"{_RUNTIME}.bootstrap"), "session_initialised", False):
        raise ImportError("elasticflow-airflow was upgraded while this script ran: import it before runtime.init()")
    for name in [name for name in sys.modules if name.startswith(f"{_RUNTIME}.") and name not in _IN_USE]:
        del sys.modules[name]


def _is_there(old: str) -> bool:
    """Whether the old module is in memory, and not one of today under the old one's name."""
    module = sys.modules.get(f"{_RUNTIME}.{old}")
    return module is not None and module.__name__ == f"{_RUNTIME}.{old}"

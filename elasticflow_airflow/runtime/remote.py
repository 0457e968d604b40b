"""Old location of ``stores/remote.py``: running workers of an earlier release still import it from here."""

from __future__ import annotations

import sys

from elasticflow_airflow.runtime import earlier_release

earlier_release.keep()

from elasticflow_airflow.runtime.stores import remote  # noqa: E402

sys.modules[__name__] = remote

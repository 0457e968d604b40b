"""Old location of ``stores/manifest.py``: running workers of an earlier release still import it from here."""

from __future__ import annotations

import sys

from elasticflow_airflow.runtime import earlier_release

earlier_release.keep()

from elasticflow_airflow.runtime.stores import manifest  # noqa: E402

sys.modules[__name__] = manifest

"""Old location of ``checkpoints/checkpoint.py``: running workers of an earlier release still import it from here."""

from __future__ import annotations

import sys

from elasticflow_airflow.runtime import earlier_release

earlier_release.keep()

from elasticflow_airflow.runtime.checkpoints import checkpoint  # noqa: E402

sys.modules[__name__] = checkpoint

"""Old location of ``gang/cuda_group.py``: running workers of an earlier release still import it from here."""

from __future__ import annotations

import sys

from elasticflow_airflow.runtime.gang import cuda_group

sys.modules[__name__] = cuda_group

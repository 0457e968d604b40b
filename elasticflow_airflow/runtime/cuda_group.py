"""Where ``gang/cuda_group.py`` was once: workers of such a release look for it here, late in their lives."""

from __future__ import annotations

import sys

from elasticflow_airflow.runtime.gang import cuda_group

sys.modules[__name__] = cuda_group

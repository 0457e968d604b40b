"""Where ``gang/cuda_group.py`` was once: workers of such a release look for it here, late in their lives."""

from __future__ import annotations

import sys

from elasticflow_airflow.runtime import earlier_release

earlier_release.keep()

from elasticflow_airflow.runtime.gang import cuda_group  # noqa: E402

sys.modules[__name__] = cuda_group

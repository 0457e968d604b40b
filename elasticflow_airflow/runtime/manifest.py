"""Where ``runtime/storage/manifest.py`` was once: workers of such a release look for it here, late in their lives."""

from __future__ import annotations

import sys

from elasticflow_airflow.runtime.storage import manifest

sys.modules[__name__] = manifest

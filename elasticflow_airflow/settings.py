"""The ``[elasticflow]`` section of Airflow's configuration as a typed value, and the embedded state directory.

Reads configuration only; does not call the service.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from airflow.sdk.configuration import conf

from elasticflow_airflow.client.embedded import default_state_dir

_SECTION = "elasticflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class AirflowSettings:
    """Settings of the Airflow side; see ``provider_info`` for their meaning. Times are in seconds."""

    namespace: str
    poll_interval_s: float
    dag_test_poke_s: float
    inline_wait_s: float
    min_deferral_s: float
    lease_s: float
    orphan_s: float
    service_away_s: float
    snapshot_max_bytes: int

    @classmethod
    def read(cls) -> AirflowSettings:
        """Read the configuration of this process."""
        return cls(
            namespace=conf.get(_SECTION, "namespace", fallback="default"),
            poll_interval_s=_seconds("poll_interval_s", 5.0),
            dag_test_poke_s=_seconds("dag_test_poke_s", 1.0),
            inline_wait_s=_seconds("inline_wait_s", 5.0),
            min_deferral_s=_seconds("min_deferral_s", 15.0),
            lease_s=_seconds("lease_s", 600.0),
            orphan_s=_seconds("orphan_s", 3600.0),
            service_away_s=_seconds("service_away_s", 3600.0),
            snapshot_max_bytes=int(conf.getfloat(_SECTION, "snapshot_max_mib", fallback=64.0) * 2**20),
        )


def deferrable_by_default() -> bool:
    """Whether training tasks defer by default (Airflow's own default_deferrable is false)."""
    return bool(conf.getboolean(_SECTION, "deferrable", fallback=True))


def embedded_state_dir() -> Path:
    """Return the embedded service's state directory.

    The first that is set of: the configuration, ``ELASTICFLOW_STATE_DIR``, ``AIRFLOW_HOME``, the home directory.
    """
    if configured := conf.get(_SECTION, "state_dir", fallback=""):
        return Path(os.path.expandvars(configured)).expanduser()
    return default_state_dir()


def _seconds(option: str, fallback: float) -> float:
    value = float(conf.getfloat(_SECTION, option, fallback=fallback))
    if value < 0:
        raise ValueError(f"[elasticflow] {option} = {value} is negative: give seconds, 0 or more")
    return value

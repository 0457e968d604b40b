"""The scheduling library: admission control, elastic allocation and placement of jobs with deadlines.

Pure: no clock, disk, network, threads, Airflow, torch or SQL. Start at
:class:`~elasticflow_airflow.scheduler_core.scheduler.Scheduler`.
"""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerConfig"]

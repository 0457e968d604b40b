"""Scheduling policies of the literature that our scheduler is compared with, one per file.

Each is a :class:`~elasticflow_airflow.scheduler_core.simulator.policies.Policy`, and is created by name there. Only the
simulator uses them: the service never imports this package.
"""

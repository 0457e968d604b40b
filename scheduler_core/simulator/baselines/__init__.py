"""The scheduling policies of the literature that our scheduler is compared with, one file each.

Each is a :class:`~elasticflow_airflow.scheduler_core.simulator.policy.Policy`, and is made by its name in
:mod:`~elasticflow_airflow.scheduler_core.simulator.registry`. Only the simulator plays them: the service never imports
this package.
"""

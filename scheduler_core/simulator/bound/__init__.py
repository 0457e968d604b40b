"""An upper bound on the number of deadlines that any schedule could meet, for comparison with policies.

The entry point is :func:`~elasticflow_airflow.scheduler_core.simulator.bound.clairvoyant.clairvoyant_bound`. It needs
scipy when it is called.
"""

"""How many deadlines any schedule could meet: what the figures of policies are compared with.

Start at :func:`~elasticflow_airflow.scheduler_core.simulator.bound.clairvoyant.clairvoyant_bound`. Needs scipy, when it
is called.
"""

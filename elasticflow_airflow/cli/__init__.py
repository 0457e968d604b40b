"""The ``elasticflow`` command; it runs without Airflow."""

"""The ``elasticflow`` command; it runs where there is no Airflow."""

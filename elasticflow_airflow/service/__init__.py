"""The scheduler service: HTTP API, store, reconcile loop. Runs where there is no Airflow; imports nothing by itself."""

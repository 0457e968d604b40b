"""What ``make demo`` adds around the example DAG: a private Airflow, a picture of what happens, and a summary."""

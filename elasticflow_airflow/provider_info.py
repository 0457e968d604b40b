"""What Airflow learns about this provider without importing anything else."""

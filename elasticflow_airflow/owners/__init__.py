"""The task instances that own a service's jobs, according to Airflow's database."""

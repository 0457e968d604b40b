"""Which task instances own the jobs of a service, as Airflow's database has them."""

"""Future runs: reported to the service, or forecast before a DAG is merged."""

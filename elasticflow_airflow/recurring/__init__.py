"""The runs that are still to come: told to the service, or asked about before a DAG is merged."""

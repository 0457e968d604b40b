"""Training deadlines: as written by an author, derived from the DAG, and derived from a downstream target."""

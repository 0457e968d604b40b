"""By when a training has to end: as an author writes it, from the DAG, and for what follows it."""

"""Which samples make which step, from a data set or a stream, and how they are fetched."""

"""The calls of the HTTP API as values, and how their responses are read."""

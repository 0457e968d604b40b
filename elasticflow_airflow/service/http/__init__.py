"""The HTTP API: the application, its limits, and its routes."""

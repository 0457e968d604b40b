"""An engine without processes, for tests and for trying things out."""

"""The typed documents that columns hold, and how they become JSON."""

"""Processes of the runtime: fork server, warm process, and how they are bound to their parents."""

"""Processes of the runtime: fork server, warm process, and what ties them to their parents."""

"""Answers questions about the future and decides nothing: forecasts, and which nodes can be removed."""

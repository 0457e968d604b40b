"""Questions about the future, decided by nobody: forecasts, and which nodes can go."""

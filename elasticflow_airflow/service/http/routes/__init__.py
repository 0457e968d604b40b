"""The routes of the HTTP API, by what they are about. All rules are elsewhere."""

"""Engines: the port through which the service drives workers, and its adapters.

Importing this package loads none of them: ask for ``engines.fake`` or ``engines.local`` by name.
"""

"""Alembic migrations of the store, inside the package so that a wheel can upgrade a database."""

"""The database: tables, transactions, and how rows look from outside."""

"""Several services on one database: what they agree on, and who of them decides."""

"""Several services on one database: which one decides, and how another one takes over."""

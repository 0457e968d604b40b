"""How a task waits for its job in a worker or in the triggerer: progress, outages, kills and leases."""

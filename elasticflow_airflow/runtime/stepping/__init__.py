"""One optimizer step of logical workers: gradients, sums, statistics and what it all costs."""

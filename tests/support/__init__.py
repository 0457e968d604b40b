"""What several areas of the tests, and the benchmarks, share."""

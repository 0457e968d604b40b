"""Code snapshots, and what the engine tells of a job's checkpoints and logs."""

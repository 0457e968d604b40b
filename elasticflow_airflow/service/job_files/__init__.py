"""What lies on disk for a job: its code, its checkpoints, its heartbeats and logs."""

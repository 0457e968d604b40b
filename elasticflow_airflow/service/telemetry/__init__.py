"""What the service tells about itself: its log, traces, counts and durations."""

"""What a checkpoint holds, when it is taken, and the process that writes it."""

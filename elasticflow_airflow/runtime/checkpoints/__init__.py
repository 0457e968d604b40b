"""The contents of a checkpoint, when it is saved, and the process that writes it."""

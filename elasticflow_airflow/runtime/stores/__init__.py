"""Where checkpoints lie, and how they are published whole or not at all."""

"""Stores for checkpoints, which publish each one completely or not at all."""

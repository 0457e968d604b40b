"""The reconcile loop and its stages, which drive the actual state to the desired state."""

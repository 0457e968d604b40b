"""The reconcile loop and its stages: from what is to what should be."""

"""Admission and allocation of slots over time: from minimum shares to plans that are their own proof."""

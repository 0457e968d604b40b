"""Outputs of a simulation: schedule files, data series and plots."""

"""Supervisors and the workers that they run; they outlive the service."""

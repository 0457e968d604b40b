"""Inputs of a simulation: traces, scaling curves and tables of job pairs, and generators of synthetic traces."""

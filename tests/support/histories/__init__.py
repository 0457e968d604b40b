"""Histories of leader, lease and nodes in modelled time, from a seed, and a checker that judges what was recorded."""

"""What a simulation reads: traces, scaling curves, tables of pairs; or makes, for want of them."""

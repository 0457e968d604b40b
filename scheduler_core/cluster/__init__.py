"""The cluster: its nodes, the placement of gangs on slots, and free capacity over time."""

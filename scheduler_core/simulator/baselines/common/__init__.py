"""Code shared by several policies of the literature: gangs, rounds, bookings and prices."""

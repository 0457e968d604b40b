"""What several policies of the literature share: gangs, rounds, bookings and prices."""

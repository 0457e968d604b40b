"""What a simulation leaves: schedules as files, series of numbers, and plots."""

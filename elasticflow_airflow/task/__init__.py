"""What an elastic task asks for and gets: its arguments, what is submitted of it, its result."""

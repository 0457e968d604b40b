"""The input and output of an elastic task: its arguments, its submission, its result."""

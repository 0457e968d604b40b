"""Input and output of the command line: tables, times, and the options of its commands."""

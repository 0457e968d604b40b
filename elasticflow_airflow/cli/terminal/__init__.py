"""Input and output of the command line: lines, tables, times, and the options of its commands."""

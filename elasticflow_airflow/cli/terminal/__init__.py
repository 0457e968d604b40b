"""How the command line reads and writes: tables, times, and the options of its commands."""

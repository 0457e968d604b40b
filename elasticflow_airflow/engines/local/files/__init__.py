"""What the local engine keeps on disk: of each generation, of its gangs, and of workers' output."""

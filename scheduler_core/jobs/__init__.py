"""What is known about each live job: its progress, its speed at each size, and slow workers in its gang."""

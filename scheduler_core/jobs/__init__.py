"""What is known of each live job: how far it is, how fast at which size, and who in its gang is slow."""

"""Who is admitted, and who gets how many slots when: from minimum shares to plans that prove themselves."""

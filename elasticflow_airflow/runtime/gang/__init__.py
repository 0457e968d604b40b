"""The workers of a job as one group: how they meet, who joins or leaves, and what a joiner is handed."""

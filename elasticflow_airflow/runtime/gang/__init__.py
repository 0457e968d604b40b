"""The workers of a job as one gang: how they form a group, join or leave it, and transfer state to joiners."""

"""What the stages of the loop share: the rows of a pass, what is asked of the scheduler, what is written of it."""

"""Code shared by the stages of the loop: the rows of a pass, calls to the scheduler, and storing its decisions."""

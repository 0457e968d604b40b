"""The values of scheduling: jobs and their work, what happens, what is decided. Pure data; plans nothing."""

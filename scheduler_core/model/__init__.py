"""The values of scheduling: jobs and their work, events, decisions. Pure data; plans nothing."""

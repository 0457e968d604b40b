"""This machine: its nodes and slots, GPUs, processes and interpreters."""

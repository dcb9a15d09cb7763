"""Checkpoints of a run: when one is due, what it waits for, and how it is taken."""

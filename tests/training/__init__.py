"""Losses, advantages, layouts and batches, in one process."""

"""Micro-batches, masks and statistics of a batch."""

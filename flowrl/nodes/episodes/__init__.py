"""Nodes that play episodes: attempts, their limits, logs and reports."""

"""Nodes that write responses and pairs to files."""

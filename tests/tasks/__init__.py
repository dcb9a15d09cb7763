"""Rows of data, tasks and rewards."""

"""Checks of a response against the reference answer of its row."""

"""Samples and episodes that a run keeps, and the queries on them."""

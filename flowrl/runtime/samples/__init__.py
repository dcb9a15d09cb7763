"""Samples that a run keeps as Parquet, and the queries on them."""

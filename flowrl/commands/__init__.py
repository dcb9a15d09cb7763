"""The commands of `flowrl` that are more than a call."""

"""Losses, and the objectives that say which columns of a batch they need."""

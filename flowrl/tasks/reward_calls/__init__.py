"""Calls of reward functions and servers."""

"""Nodes that play episodes, and the credit that goes to their turns and seats."""

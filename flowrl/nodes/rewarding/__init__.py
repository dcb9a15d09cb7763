"""Nodes that score samples: reward functions, reward models, process rewards."""

"""Nodes that score samples: reward functions and reward models, references, critics, teachers."""

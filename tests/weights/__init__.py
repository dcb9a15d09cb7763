"""Weights on their way from trainer to engine."""

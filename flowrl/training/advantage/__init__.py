"""Advantages and returns, from rewards to one number for each token."""

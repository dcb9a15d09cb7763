"""Held-out evaluation: what is asked, what scores the answers, and the figures."""

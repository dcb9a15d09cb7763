"""How fast a trainer is, and what graphs learn."""

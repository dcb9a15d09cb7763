"""What data and rewards of every shape become, and what rows cost."""

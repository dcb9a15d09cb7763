"""The driver: how a run starts, whom it watches, and how it ends."""

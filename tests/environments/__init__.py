"""Environments, tools and sandboxes, and the adapters of other packages."""

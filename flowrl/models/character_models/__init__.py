"""The built-in character models, `tiny` and `tiny_agent`, and how they are made."""

"""The size of a model before it is loaded, and the defaults that depend on it."""

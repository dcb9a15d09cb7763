"""The built-in nodes in the hands of a test, each without the rest of a run."""

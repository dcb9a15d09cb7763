"""The wire: how a message gets from a node of one process to a node of another, exactly once."""

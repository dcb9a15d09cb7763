"""A host's process: it builds its node replicas, wires their ports and runs them."""

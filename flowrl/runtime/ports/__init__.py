"""The live side of a node's ports: items, acks, tombstones, requests."""

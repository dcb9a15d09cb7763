"""Nodes that compare the members of a group (advantages, filters, selection), and the batcher of groups."""

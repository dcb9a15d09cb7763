"""Snapshots, checkpoints and runs that go on from them."""

"""Nodes that play episodes, in environments or by agents: attempts, their limits, logs and reports."""

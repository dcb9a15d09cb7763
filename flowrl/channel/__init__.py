"""Lanes between processes: messages, credits, tickets and the connections that carry them."""

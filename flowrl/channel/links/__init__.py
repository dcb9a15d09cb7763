"""Connections between processes: addresses, sockets, peers and shared memory."""

"""What a host is doing: its waits, its event loop, its device leases and standstills."""

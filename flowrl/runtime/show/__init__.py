"""What `flowrl show` and `flowrl samples` print."""

"""What commands of `flowrl` do that is more than a call."""

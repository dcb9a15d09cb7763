"""Messages and frames as bytes."""

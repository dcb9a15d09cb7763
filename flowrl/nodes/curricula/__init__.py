"""Which prompt of a source is asked next."""

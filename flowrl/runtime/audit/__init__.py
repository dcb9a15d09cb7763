"""`flowrl audit`: recomputes from the ledger that each sample has one fate and no token was too old."""

"""The ledger: which sample was admitted, generated, scored, trained or lost, committed as a hash chain."""

"""A run: its driver, its hosts, the ledger, checkpoints and all that a run directory holds."""

"""A run's hosts, ports, ledger, checkpoints and driver, most of them without processes."""

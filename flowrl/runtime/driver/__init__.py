"""The driver's process: it starts the hosts of a run, watches them and writes its records."""

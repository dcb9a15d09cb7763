"""The driver's process: it starts the processes of a run, watches them and writes its records."""

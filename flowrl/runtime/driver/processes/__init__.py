"""The host processes of a run, seen from the driver."""

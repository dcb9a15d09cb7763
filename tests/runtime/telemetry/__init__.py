"""Metrics, alarms, traces and the view of a run."""

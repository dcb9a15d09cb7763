"""Metrics, statistics, traces, alarms and what the terminal shows of a run."""

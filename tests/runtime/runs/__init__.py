"""Whole runs in one process, most of them in virtual time."""

"""Rigs of tests in several rooms."""

"""Declaring, checking, planning and drawing graphs."""

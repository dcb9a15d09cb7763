"""Processes that play episodes one after another: they are forked from a zygote, and killed when they hang."""

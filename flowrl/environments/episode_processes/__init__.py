"""Processes that play episodes: forked from a zygote, one episode after another, killed when they hang."""

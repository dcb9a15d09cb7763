"""Gangs of real ZeRO ranks without Ray, each rank a process that `tests.stack.ranks.ranks` starts."""

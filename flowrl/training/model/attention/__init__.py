"""Attention over a forest of sequences: who sees whom, the kernels, and the rule that chooses one."""

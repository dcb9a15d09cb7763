"""Random legal graphs, run with random failures, crashes and resumes, and counted by somebody else than flowrl.

`shape` draws a graph and its schedule from a seed, `graph` builds it of the `nodes`, `life` runs it in virtual time
(`clock`), `record` keeps what the nodes really did, and `oracle` says what is wrong. `python -m tests.random_graphs`
runs many; `flowrl check tests/random_graphs/graph.py --seed N` shows one.
"""

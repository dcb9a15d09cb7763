"""One process of a run: it builds its node replicas, connects their ports and runs them."""

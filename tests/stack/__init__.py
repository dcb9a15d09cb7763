"""Real Ray, vLLM and ZeRO: whole runs, and the parts that need them."""

"""The generator with a stand-in for vLLM: sampling, updates, checkpoints, devices."""

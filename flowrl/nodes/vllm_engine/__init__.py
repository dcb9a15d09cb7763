"""vLLM as a generator runs it: options, start, sampling, adapters, the end of its processes."""

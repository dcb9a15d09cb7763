"""vLLM as a generator runs it: options, start, sampling, adapters, and the end of vLLM's processes."""

"""A transformers model as the trainer uses it: placement of tokens, logprobs, values, adapters."""

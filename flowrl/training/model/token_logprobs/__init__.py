"""Logprobs and entropies of tokens, from hidden states and the output layer."""

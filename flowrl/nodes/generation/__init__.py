"""The generator, and vLLM in its process: responses to prompts, across weight updates and checkpoints."""

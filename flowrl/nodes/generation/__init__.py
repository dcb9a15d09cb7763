"""The generator: responses to prompts, across weight updates and checkpoints."""

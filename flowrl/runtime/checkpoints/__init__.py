"""The run directory, and checkpoints: written, found and resumed from."""

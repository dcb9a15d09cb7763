"""The stages of `flowrl gpu-check`."""

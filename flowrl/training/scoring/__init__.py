"""Models that only score: in this process, or sharded over the GPUs of several."""

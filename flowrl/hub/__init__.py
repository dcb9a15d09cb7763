"""Models and datasets by their name on the Hugging Face Hub: found in the cache on this machine, or downloaded."""

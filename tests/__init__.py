"""What `python -m tests…` and pytest import first."""

import gc

gc.set_threshold(50_000, *gc.get_threshold()[1:])
"""While modules load nearly all objects stay; the ranks that tests start import torch and DeepSpeed each."""

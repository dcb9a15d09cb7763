"""What `python -m tests…` and pytest import first."""

import gc
import os

gc.set_threshold(50_000, *gc.get_threshold()[1:])
"""While modules load nearly all objects stay; the ranks that tests start import torch and DeepSpeed each."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported: two test processes with two threads each wait for each other on two cores, spinning."""

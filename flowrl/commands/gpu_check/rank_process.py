"""One rank of a stage: `python -m flowrl.commands.gpu_check.rank_process TARGET DEVICE SIZE PORT RANK DIRECTORY ...`"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Meet the gang, do the work, leave."""
    target, device, size, port, rank, directory, *arguments = sys.argv[1:]
    import torch

    from flowrl.training.engine.gang import Gang

    if device == "cpu":
        torch.set_num_threads(1)
    module, _, name = target.partition(":")
    gang = Gang.meet_ranks(
        int(rank), int(size), f"127.0.0.1:{port}", torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    )
    getattr(import_module(module), name)(gang, Path(directory), arguments)
    gang.leave_gang()
    sys.stdout.flush()
    os._exit(0)  # a normal exit is sometimes aborted by threads of the process group


if __name__ == "__main__":
    main()

"""`make demo`: `flowrl quickstart` into runs/demo, or with --control into runs/demo-control, which are replaced."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from flowrl.cli import main


def demo(args: Sequence[str]) -> int:
    """Exit status of `flowrl quickstart` with these options; --run-dir keeps what is there."""
    if any(arg.partition("=")[0] == "--run-dir" for arg in args):
        return main(["quickstart", *args])
    run_dir = Path("runs") / ("demo-control" if "--control" in args else "demo")
    if run_dir.exists():
        shutil.rmtree(run_dir)
    return main(["quickstart", "--run-dir", str(run_dir), *args])


if __name__ == "__main__":
    sys.exit(demo(sys.argv[1:]))

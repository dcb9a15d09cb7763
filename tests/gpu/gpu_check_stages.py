"""Stages for the tests of `flowrl gpu-check`, each with another end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.commands.gpu_check.bench import Bench


def fine(bench: Bench) -> None:
    count = bench.directory.parent / "count"
    count.write_text(count.read_text() + "x" if count.exists() else "x")
    bench.figure("answer", "4|2")


def wrong(bench: Bench) -> None:
    bench.figure("found", "1")
    bench.require(1 == 2, "one is not two")


def broken(bench: Bench) -> None:
    print("a line before")
    raise ValueError("something else")


def killed(bench: Bench) -> None:
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def endless(bench: Bench) -> None:
    """Starts a process that would outlive it."""
    bench.figure("half", "done")
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    (bench.directory / "child").write_text(str(child.pid))
    (bench.directory / "figures.json").write_text('{"half": "done"}')
    print("waiting", flush=True)
    signal.pause()


def in_failing_ranks(bench: Bench) -> None:
    bench.ranks("tests.gpu.gpu_check_stages:failing_rank")


def failing_rank(gang: Any, directory: Path, arguments: Sequence[str]) -> None:
    if gang.rank == 1:
        raise ValueError("rank 1 has no memory left")
    gang.gather_objects(0)  # waits for rank 1

"""The ranks of one gang, each a process of its own: a module below `tests` whose `main` is `as_rank(work)`.

Waits: for the ranks to end. One that fails ends the others, which would wait for it in a collective until gloo gives
up; when time is up, every rank says where it stands and is killed. Either way the error tells what each rank said.
"""

from __future__ import annotations

import faulthandler
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tests import warm

if TYPE_CHECKING:
    from flowrl.training.engine.gang import Gang

ROOT = Path(__file__).parents[3]
LAST_CHARACTERS = 4000
STACKS_WITHIN_S = 2.0
"""Time in which ranks that are late write down where they stand."""
OTHERS_WITHIN_S = 3.0
"""Time for the other ranks after one has failed: they may have more to say than that a peer is gone."""


@dataclass(frozen=True)
class Rank:
    """One running rank."""

    number: int
    process: subprocess.Popen[bytes]
    output: IO[str]

    def told(self) -> str:
        """How it has ended, and the last of what it said."""
        status = self.process.poll()
        how = "was still running" if status is None else f"ended with status {status}"
        self.output.seek(0)
        return f"rank {self.number} {how}:\n{self.output.read()[-LAST_CHARACTERS:].rstrip()}"


def run_ranks(
    module: str,
    directory: Path,
    *arguments: str,
    size: int = 2,
    timeout_s: float = 280.0,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run `python -m MODULE RANK SIZE PORT DIRECTORY ARGUMENTS...` for every rank, and wait until all have ended.

    Raises AssertionError if one fails, or if they take longer than `timeout_s`.
    """
    ends_s = time.monotonic() + timeout_s
    ranks = _start(module, [str(size), _free_port(), str(directory), *arguments], size, env or {})
    try:
        if not _all_ended(ranks, ends_s):
            for rank in ranks:
                rank.process.send_signal(signal.SIGUSR1)
            _all_ended(ranks, time.monotonic() + STACKS_WITHIN_S)
            raise AssertionError(_report(ranks, f"{module} took longer than {timeout_s:g} s"))
        if any(rank.process.returncode for rank in ranks):
            raise AssertionError(_report(ranks, f"{module} failed"))
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()
            rank.output.close()


def _start(module: str, arguments: Sequence[str], size: int, env: Mapping[str, str]) -> list[Rank]:
    ranks = []
    python = warm.python()
    variables = {**os.environ, **env}  # with the one that `python` needs
    for number in range(size):
        output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - `run_ranks` closes it
        command = [python, "-m", module, str(number), *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=variables)
        ranks.append(Rank(number, process, output))
    return ranks


def _all_ended(ranks: Sequence[Rank], ends_s: float) -> bool:
    """Wait until all have ended, and no longer than OTHERS_WITHIN_S after one has failed. False if time is up."""
    handles = {os.pidfd_open(rank.process.pid): rank for rank in ranks}
    try:
        while handles:
            ended = multiprocessing.connection.wait(list(handles), timeout=max(0.0, ends_s - time.monotonic()))
            if not ended:
                return any(rank.process.poll() for rank in ranks)
            for handle in ended:
                assert isinstance(handle, int)
                os.close(handle)
                if handles.pop(handle).process.wait():
                    ends_s = min(ends_s, time.monotonic() + OTHERS_WITHIN_S)
    finally:
        for handle in handles:
            os.close(handle)
    return True


def _report(ranks: Sequence[Rank], what: str) -> str:
    return "\n\n".join([what, *(rank.told() for rank in ranks)])


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def as_rank(work: Callable[[Gang, Path, Sequence[str]], None]) -> None:
    """The main of a rank: meets its gang, does `work(gang, directory, further arguments)`, and leaves it."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch

    from flowrl.training.engine.gang import Gang

    rank, size, port, directory, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    gang = Gang.meet_ranks(int(rank), int(size), f"127.0.0.1:{port}", torch.device("cpu"))
    work(gang, Path(directory), arguments)
    gang.leave_gang()
    # gloo's threads that DeepSpeed still refers to now and then abort the interpreter's own way out.
    sys.stdout.flush()
    os._exit(0)

"""What a stage of `flowrl gpu-check` works with: its device, its directory, and where its figures go."""

from __future__ import annotations

import multiprocessing.connection
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flowrl.errors import FlowrlError
from flowrl.machine.orphans import run_program
from flowrl.runtime.telemetry.standard_streams import print_text

DeviceKind = Literal["cuda", "cpu"]
TOLD_LINES = 15
"""Number of last lines of an output to report."""


class StageFailed(FlowrlError):
    """A requirement of the stage does not hold."""


@dataclass
class Bench:
    """The working environment of one stage. `figures` are its results, by name, as they are printed in the table."""

    device: DeviceKind
    num_gpus: int
    directory: Path
    figures: dict[str, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        """Whether the models of this stage are on a GPU; without one they are small."""
        return self.device == "cuda"

    @property
    def num_ranks(self) -> int:
        """Number of ranks of a gang: two if there are devices for two, else one, because NCCL refuses two ranks on one
        GPU."""
        return 2 if not self.on_gpu or self.num_gpus > 1 else 1

    def figure(self, name: str, text: str) -> None:
        self.figures[name] = text
        print_text(f"{name}: {text}", flush=True)

    def require(self, holds: bool, sentence: str) -> None:
        """Raise StageFailed with the sentence, unless `holds`."""
        if not holds:
            raise StageFailed(sentence)

    def run(self, command: Sequence[str], *, env: dict[str, str] | None = None) -> str:
        """The output of a command of flowrl: `command` follows `python -m`. Raises StageFailed if it fails."""
        told = run_program([sys.executable, "-m", *command], together=True, env={**os.environ, **(env or {})})
        if told.returncode:
            raise StageFailed(
                f"{' '.join(command[:3])} ended with status {told.returncode}:\n{last_lines(told.stdout)}"
            )
        return told.stdout

    def ranks(self, target: str, *arguments: str) -> None:
        """Run `target`, "module:function", in `num_ranks` processes, each with its own device.

        The function is called as function(gang, directory, arguments). Raises StageFailed if a rank fails; the other
        ranks are then killed, because they would wait for it.
        """
        size, port = self.num_ranks, _free_port()
        command = [sys.executable, "-m", f"{__package__}.rank_process", target, self.device, str(size), port]
        processes = []
        for rank, sight in enumerate(self.sights(size)):
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": sight} if self.on_gpu else None
            with (self.directory / f"rank-{rank}.log").open("w", encoding="utf-8") as output:
                given = [*command, str(rank), str(self.directory), *arguments]
                process = subprocess.Popen(given, stdout=output, stderr=subprocess.STDOUT, env=env)
            processes.append(process)
        try:
            failed = _first_failed(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed is not None:
            text = (self.directory / f"rank-{failed}.log").read_text(errors="replace", encoding="utf-8")
            raise StageFailed(f"rank {failed} of {size} failed:\n{last_lines(text)}")

    def sights(self, count: int) -> list[str]:
        """For each of `count` processes, the value of CUDA_VISIBLE_DEVICES with which it sees only its own GPU."""
        if not self.on_gpu:
            return [""] * count
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = named.split(",") if named else [str(index) for index in range(self.num_gpus)]
        return visible[:count]


def last_lines(text: str) -> str:
    """The end of an output."""
    return "\n".join(text.rstrip().splitlines()[-TOLD_LINES:])


def _first_failed(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all have ended, or one has failed. Returns the number of the failed one, or None."""
    waiting = {os.pidfd_open(process.pid): rank for rank, process in enumerate(processes)}
    try:
        while waiting:
            for handle in multiprocessing.connection.wait(list(waiting)):
                assert isinstance(handle, int)
                os.close(handle)
                rank = waiting.pop(handle)
                if processes[rank].wait():
                    return rank
    finally:
        for handle in waiting:
            os.close(handle)
    return None


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])

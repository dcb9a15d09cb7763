"""A model that fits no single GPU: its weights are sharded over processes, one for each GPU, by ZeRO-3, forward only.

The processes are children of this one and run on its machine, as vLLM's workers do. This process has no part of the
model: it divides passes among the ranks, which compute them in parallel. In each round every rank calls the model
exactly once, because gathering a layer needs all ranks; a rank without a pass computes padding.

Waits: for the answer of every rank. If a rank fails or dies, the other ranks are killed, and the wait raises
ShardFailed.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from flowrl.errors import ConfigError, FlowrlError
from flowrl.training.model.loading import ModelLoad
from flowrl.training.scoring.local_model import Pass
from flowrl.training.scoring.passes import tokens_of
from flowrl.training.settings import Layout

R = TypeVar("R")
RANK = "flowrl.training.scoring.rank"
CLOSED_WITHIN_S = 10.0


class ShardFailed(FlowrlError):
    """A rank of a sharded model failed or died."""


@dataclass(frozen=True)
class RankStart:
    """What a rank receives at its start."""

    rank: int
    size: int
    address: str
    device: str
    """"cuda" or "cpu"."""
    threads: int
    load: ModelLoad


@dataclass(frozen=True)
class _Rank:
    process: subprocess.Popen[bytes]
    pipe: Connection


class ShardedModel:
    """The model of `load`, sharded over one rank for each of `gpus`: its CUDA_VISIBLE_DEVICES, or "" for a CPU."""

    def __init__(self, load: ModelLoad, gpus: Sequence[str], *, threads: int = 1) -> None:
        address = f"127.0.0.1:{_free_port()}"
        self._ranks = [_start(gpu) for gpu in gpus]
        for number, (rank, gpu) in enumerate(zip(self._ranks, gpus, strict=True)):
            device = "cuda" if gpu else "cpu"
            rank.pipe.send(RankStart(number, len(gpus), address, device, threads, load))
        first = self._answers()[0]
        self.layout: Layout = first["layout"]
        self._facts: dict[str, Any] = first["facts"]

    @property
    def facts(self) -> dict[str, Any]:
        return self._facts

    def run(self, one: Pass[R], passes: Sequence[Sequence[Any]], trees: bool, *args: Any) -> Iterator[list[R]]:
        """The results of each of `passes`, in order. As many passes run at a time as there are ranks."""
        size = len(self._ranks)
        for start in range(0, len(passes), size):
            part = list(passes[start : start + size])
            padding = [[min(part[0], key=lambda item: len(tokens_of(item)))]] * (size - len(part))
            found = self._ask([("pass", one, items, trees, args) for items in (*part, *padding)])
            yield from found[: len(part)]

    def every(self, function: Callable[..., Any], *args: Any) -> None:
        self._ask([("call", function, args)] * len(self._ranks))

    def leave(self) -> None:
        self._ask([("leave",)] * len(self._ranks))

    def come_back(self) -> None:
        self._ask([("come_back",)] * len(self._ranks))

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            rank.pipe.close()
        for rank in self._ranks:
            try:
                rank.process.wait(CLOSED_WITHIN_S)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()

    def _ask(self, questions: Sequence[Any]) -> list[Any]:
        for rank, question in zip(self._ranks, questions, strict=True):
            try:
                rank.pipe.send(question)
            except OSError:
                self._fail(self._ranks.index(rank), "ended before it was asked")
        return self._answers()

    def _answers(self) -> list[Any]:
        """The answer of each rank."""
        handles = [os.pidfd_open(rank.process.pid) for rank in self._ranks]
        try:
            return self._answers_or_ends(handles)
        finally:
            for handle in handles:
                os.close(handle)

    def _answers_or_ends(self, handles: Sequence[int]) -> list[Any]:
        waiting = {rank.pipe: number for number, rank in enumerate(self._ranks)}
        answers: dict[int, Any] = {}
        while waiting:
            ready = multiprocessing.connection.wait([*waiting, *(handles[number] for number in waiting.values())])
            for pipe, number in [*waiting.items()]:
                if pipe not in ready and handles[number] not in ready:
                    continue
                del waiting[pipe]
                try:
                    if not pipe.poll():  # the rank has ended, but something that it started holds the pipe
                        raise EOFError
                    kind, content = pipe.recv()
                except (EOFError, OSError):
                    self._fail(number, "died; its last lines are in the output of this process")
                if kind == "mistake":
                    self._kill()
                    raise ConfigError(content)
                if kind == "failed":
                    self._fail(number, f"failed:\n{content}")
                answers[number] = content
        return [answers[number] for number in range(len(self._ranks))]

    def _fail(self, number: int, how: str) -> None:
        self._kill()
        raise ShardFailed(f"rank {number} of {len(self._ranks)} that share the model {how}")

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.process.wait()


def _start(gpu: str) -> _Rank:
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", RANK, str(theirs.fileno()), str(os.getpid())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
    theirs.close()
    return _Rank(process, Connection(ours.detach()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

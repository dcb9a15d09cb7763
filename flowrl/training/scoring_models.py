"""Models that only score: in this process, or sharded over the GPUs of several.

Nodes request passes from a model, and move it off a GPU that they time-share. A pass is a plain function of (model,
items, trees, further arguments) with one result for each item, in order. It calls the model exactly once; ranks that
share a model rely on that. `trees`: the sequences of the pass form a tree.

A model that fits no single GPU (`ShardedModel`): its weights are sharded over processes, one for each GPU, by ZeRO-3,
forward only.

The processes are children of this one and run on its machine, as vLLM's workers do. This process has no part of the
model: it divides passes among the ranks, which compute them in parallel. In each round every rank calls the model
exactly once, because gathering a layer needs all ranks; a rank without a pass computes padding.

Waits: for the answer of every rank. If a rank fails or dies, the other ranks are killed, and the wait raises
ShardFailed.
"""

from __future__ import annotations

import gc
import multiprocessing.connection
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Bool, Float32, Int32
from flowrl.messages.packing import passes_over
from flowrl.training.model.policy_model import PolicyModel
from flowrl.training.model.row_layout import RowLayout, lay_out, lay_out_ends, policy_places
from flowrl.training.model.value_model import ScalarModel
from flowrl.training.settings import Attention, Dtype, Head, Layout, Start

if TYPE_CHECKING:
    from flowrl.training.model.policy_model import PolicyModel
    from flowrl.training.model.value_model import ScalarModel


Masked = tuple[Int32, Bool]
"""A sequence and which of its tokens are the policy's."""


def logprobs_of(model: PolicyModel, items: Sequence[Masked], trees: bool, temperature: float) -> list[Float32]:
    """log p of the policy tokens of each sequence, at their positions; 0 elsewhere."""
    with torch.no_grad():
        logprobs_N, _ = model(lay_out_items(model, items, trees), temperature)
    return _at_places(items, logprobs_N)


def judgements_of(
    model: PolicyModel, items: Sequence[Masked], trees: bool, temperature: float
) -> list[tuple[Float32, Float32]]:
    """(logprobs as of `logprobs_of`, last hidden states [policy tokens, K]) of each sequence."""
    with torch.no_grad():
        logprobs_N, _, hidden_NK = model(lay_out_items(model, items, trees), temperature, with_hidden=True)
    ends = np.cumsum([len(policy_places(mask)) for _, mask in items])[:-1]
    hidden = np.split(hidden_NK.float().cpu().numpy(), ends)
    return list(zip(_at_places(items, logprobs_N), hidden, strict=True))


def values_of_pass(
    model: ScalarModel, items: Sequence[Masked], trees: bool, weights: Sequence[float] = (1.0,)
) -> list[Float32]:
    """V of the state before each policy token of each sequence, at the token's position; 0 elsewhere.

    For a head with several labels, V is the sum of their values, weighted by `weights`.
    """
    with torch.no_grad():
        values_NC = _by_label(model(lay_out_items(model, items, trees)))
        values_N = values_NC @ torch.tensor(weights, dtype=values_NC.dtype, device=values_NC.device)
    return _at_places(items, values_N)


def scores_of_pass(model: ScalarModel, items: Sequence[Int32], trees: bool) -> list[tuple[float, ...]]:
    """The head's value, or that of each label, at the last token of each sequence."""
    device = model.network.score.weight.device
    rows = lay_out_ends(items, layout="tree" if trees else "padded", device=device)
    with torch.no_grad():
        scores_BC = _by_label(model(rows))
    return [tuple(scores) for scores in scores_BC.tolist()]


def _by_label(values: Tensor) -> Tensor:
    """[N] or [N, C] as [N, C]."""
    return values if values.ndim == 2 else values[:, None]


def lay_out_items(model: PolicyModel | ScalarModel, items: Sequence[Masked], trees: bool) -> RowLayout:
    tokens, masks = zip(*items, strict=True)
    device = next(model.parameters()).device
    return lay_out(tokens, masks, layout="tree" if trees else "padded", device=device)


def _at_places(items: Sequence[Masked], values_N: Tensor) -> list[Float32]:
    places = [policy_places(mask) for _, mask in items]
    results = [np.zeros(len(tokens), np.float32) for tokens, _ in items]
    parts = torch.split(values_N.float().cpu(), [len(where) for where in places])
    for result, where, part in zip(results, places, parts, strict=True):
        result[where] = part.numpy()
    return results


def tokens_of(item: Any) -> Int32:
    """The tokens of an item of a pass."""
    tokens: Int32 = item[0] if isinstance(item, tuple) else item
    return tokens


R = TypeVar("R")
Pass = Callable[..., list[R]]
"""See `flowrl.training.scoring_models`."""


class ScoringModel(Protocol):
    """A model that only scores. Its methods block."""

    layout: Layout
    """How its passes are laid out."""

    @property
    def facts(self) -> dict[str, Any]:
        """The model's config, as transformers has it."""
        ...

    def run(self, one: Pass[R], passes: Sequence[Sequence[Any]], trees: bool, *args: Any) -> Iterator[list[R]]:
        """The results of each of `passes`, in order."""
        ...

    def call_everywhere(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(model, *args)` in every process that has the model or a part of it."""
        ...

    def move_away(self) -> None:
        """Move the model to host memory."""
        ...

    def come_back(self) -> None:
        """Move the model to its GPUs."""
        ...

    def close(self) -> None: ...


class LocalModel:
    """The whole model in this process."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layout: Layout = getattr(model, "layout", "rows")

    @property
    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = self.model.network.config.to_dict()
        return found

    def run(self, one: Pass[R], passes: Sequence[Sequence[Any]], trees: bool, *args: Any) -> Iterator[list[R]]:
        for items in passes:
            yield one(self.model, items, trees, *args)

    def call_everywhere(self, function: Callable[..., Any], *args: Any) -> None:
        function(self.model, *args)

    def move_away(self) -> None:
        """Move the model to host memory, and return its memory to the device; torch would keep it for this process."""
        self.model.to("cpu")
        torch.cuda.empty_cache()

    def come_back(self) -> None:
        self.model.to("cuda")

    def close(self) -> None:
        """Free the model's memory. No method may be called afterwards."""
        on_gpu = torch.cuda.is_available() and next(iter(self.model.parameters()), torch.empty(0)).is_cuda
        self.model = None
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def score_items(
    model: ScoringModel | nn.Module, one: Pass[R], items: Sequence[Any], *args: Any, token_budget: int
) -> list[R]:
    """The result of each item. A pass has at most `token_budget` tokens, padding included, or a single longer item."""
    where: Any = LocalModel(model) if isinstance(model, nn.Module) else model
    cut, trees = passes_over([tokens_of(item) for item in items], token_budget, where.layout)
    found: dict[int, R] = {}
    for indices, results in zip(
        cut, where.run(one, [[items[i] for i in part] for part in cut], trees, *args), strict=True
    ):
        found |= zip(indices, results, strict=True)
    return [found[index] for index in range(len(items))]


@dataclass(frozen=True)
class ModelLoad:
    """One model directory and how it is loaded, see `load_policy_model` and `load_scalar_model`.

    A scalar head that was saved keeps all its labels.
    """

    path: str
    head: Head = "lm"
    start: Start = "policy"
    dtype: Dtype = "float32"
    attention: Attention = "sdpa"
    trust_remote_code: bool = False
    layout: Layout = "auto"

    def load_model(self, *, tries: bool = True) -> PolicyModel | ScalarModel:
        """The model in host memory; under ZeRO-3, this rank's part. `tries`: try a tree if the model takes trees."""
        from flowrl.training.model.policy_model import load_policy_model
        from flowrl.training.model.products import multiply_fast
        from flowrl.training.model.value_model import load_scalar_model

        options = {
            "dtype": self.dtype,
            "attention": self.attention,
            "trust_remote_code": self.trust_remote_code,
            "layout": self.layout,
            "tries": tries,
        }
        found: PolicyModel | ScalarModel
        if self.head == "lm":
            found = load_policy_model(self.path, **options)  # type: ignore[arg-type]
        else:
            every = self.start == "reward_model"
            found = load_scalar_model(self.path, start=self.start, every_label=every, **options)  # type: ignore[arg-type]
        multiply_fast(found.network)
        return found.eval()


RANK = "flowrl.training.scoring_rank"
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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._ranks: list[_Rank] = []
        for gpu in gpus:
            ours, theirs = socket.socketpair()
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", RANK, str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
            theirs.close()
            self._ranks.append(_Rank(process, Connection(ours.detach())))
        for number, (rank, gpu) in enumerate(zip(self._ranks, gpus, strict=True)):
            device = "cuda" if gpu else "cpu"
            rank.pipe.send(RankStart(number, len(gpus), address, device, threads, load))
        first = self._await_answers()[0]
        self.layout: Layout = first["layout"]
        self.facts: dict[str, Any] = first["facts"]

    def run(self, one: Pass[R], passes: Sequence[Sequence[Any]], trees: bool, *args: Any) -> Iterator[list[R]]:
        """The results of each of `passes`, in order. As many passes run at a time as there are ranks."""
        size = len(self._ranks)
        for start in range(0, len(passes), size):
            part = list(passes[start : start + size])
            padding = [[min(part[0], key=lambda item: len(tokens_of(item)))]] * (size - len(part))
            found = self._ask_ranks([("pass", one, items, trees, args) for items in (*part, *padding)])
            yield from found[: len(part)]

    def call_everywhere(self, function: Callable[..., Any], *args: Any) -> None:
        self._ask_ranks([("call", function, args)] * len(self._ranks))

    def move_away(self) -> None:
        self._ask_ranks([("leave",)] * len(self._ranks))

    def come_back(self) -> None:
        self._ask_ranks([("come_back",)] * len(self._ranks))

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

    def _ask_ranks(self, questions: Sequence[Any]) -> list[Any]:
        for rank, question in zip(self._ranks, questions, strict=True):
            try:
                rank.pipe.send(question)
            except OSError:
                self._raise_failure(self._ranks.index(rank), "ended before it was asked")
        return self._await_answers()

    def _await_answers(self) -> list[Any]:
        """The answer of each rank. If one fails or ends, the others are killed."""
        waiting = {rank.pipe: number for number, rank in enumerate(self._ranks)}
        answers: dict[int, Any] = {}
        handles = [os.pidfd_open(rank.process.pid) for rank in self._ranks]
        try:
            while waiting:
                ready = multiprocessing.connection.wait([*waiting, *(handles[number] for number in waiting.values())])
                for pipe, number in [*waiting.items()]:
                    if pipe not in ready and handles[number] not in ready:
                        continue
                    del waiting[pipe]
                    try:
                        if not pipe.poll():  # the rank has ended, but something that it started holds the pipe
                            raise EOFError
                        kind, answers[number] = pipe.recv()
                    except (EOFError, OSError):
                        self._raise_failure(number, "died; its last lines are in the output of this process")
                    if kind == "mistake":
                        self._kill_ranks()
                        raise ConfigError(answers[number])
                    if kind == "failed":
                        self._raise_failure(number, f"failed:\n{answers[number]}")
        finally:
            for handle in handles:
                os.close(handle)
        return [answers[number] for number in range(len(self._ranks))]

    def _raise_failure(self, number: int, how: str) -> None:
        self._kill_ranks()
        raise ShardFailed(f"rank {number} of {len(self._ranks)} that share the model {how}")

    def _kill_ranks(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.process.wait()

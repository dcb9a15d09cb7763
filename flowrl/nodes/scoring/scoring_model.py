"""The common part of nodes that score with one model: where the model is, and how it leaves a GPU that is shared.

A node that shares a GPU (`g.time_share`) loads its model into host memory, moves it to the GPU when it may use the GPU,
and moves it back afterwards. So at any time only one of these models is on the device. A node with several GPUs shards
its model over them, with one process for each GPU (`flowrl.training.scoring_models`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flowrl.errors import ConfigError
from flowrl.graph.node import Footprint, Node, Share
from flowrl.messages import Sample
from flowrl.models import Policy
from flowrl.nodes.model_memory import scoring_footprint
from flowrl.training.settings import Dtype

if TYPE_CHECKING:
    from flowrl.training.scoring_models import ModelLoad, ScoringModel


R = TypeVar("R")


class ScoringNode(Node):
    """A node with one model. A subclass opens it in `setup` with `open_model`, and uses it with `score_items`."""

    policy: Policy
    dtype: Dtype
    token_budget: int
    """Most tokens of a pass."""
    scoring: Any = None
    """A ScoringModel. Annotated as Any: ports are found by evaluating annotations, and its module imports torch."""

    def open_model(self, load: ModelLoad) -> ScoringModel:
        """Load the model; blocking."""
        import torch

        torch.set_num_threads(max(1, len(self.context.cores)))
        model = open_scoring_model(load, self.context.gpus, self.load_device, threads=len(self.context.cores))
        self.scoring = model
        return model

    def score_items(self, one: Callable[..., list[R]], items: Sequence[Any], *args: Any) -> list[R]:
        """The result of the pass `one` (`flowrl.training.scoring_models`) for each item; blocking."""
        from flowrl.training.scoring_models import score_items

        assert self.scoring is not None, "`setup` opens it"
        return score_items(self.scoring, one, items, *args, token_budget=self.token_budget)

    def footprint(self, share: Share) -> Footprint | None:
        return scoring_footprint(self.scored_by, share, self.dtype, self.token_budget)

    @property
    def scored_by(self) -> Policy:
        """The model that the node loads."""
        return self.policy

    @property
    def load_device(self) -> str:
        """Where `setup` puts the model: on the GPU, unless the node shares the GPU with others."""
        return "cuda" if self.context.gpus and not self.context.time_shared else "cpu"

    async def on_acquire(self) -> None:
        if self.context.gpus and self.scoring is not None:
            await self.blocking(self.scoring.come_back)

    async def on_release(self) -> None:
        if self.context.gpus and self.scoring is not None:
            await self.blocking(self.scoring.move_away)

    async def close(self) -> None:
        if self.scoring is not None:
            self.scoring.close()


def open_scoring_model(load: ModelLoad, gpus: Sequence[int], device: str, *, threads: int) -> ScoringModel:
    """The model on `device`; with several GPUs, sharded over the GPUs of this process."""
    from flowrl.training.scoring_models import LocalModel

    if len(gpus) < 2:
        return LocalModel(load.load_model().to(device))
    from flowrl.training.scoring_models import ShardedModel

    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return ShardedModel(load, visible, threads=max(1, threads // len(visible)))


def gpu_problems(gpus: float) -> Iterator[str]:
    """What is wrong with the number of GPUs of a model that only scores, as a complete sentence; empty if valid."""
    if gpus > 1 and gpus != int(gpus):
        yield f"gpus is {gpus:g}; a model is sharded over whole GPUs, so use {int(gpus)} or {int(gpus) + 1}"


Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(eq=False)
class _Question(Generic[Q, A]):
    content: Q
    later: bool
    answer: A | None = None


class SharedPass(Generic[Q, A]):
    """Answers concurrent questions: the first caller that finds the model free runs a pass for all waiting questions.

    `answer_all(questions)` returns one answer per question, none of which is None. Each wait ends with the pass that
    answers the question. If a pass is cancelled, the other questions keep waiting for the next pass. A question that is
    asked `later` is answered by the first pass that starts when only questions of that kind wait.
    """

    def __init__(self, answer_all: Callable[[list[Q]], Awaitable[Sequence[A]]]) -> None:
        self._answer_all = answer_all
        self._waiting: list[_Question[Q, A]] = []
        self._model_is_free = asyncio.Lock()

    async def ask_model(self, content: Q, *, later: bool = False) -> A:
        """Return the answer; raises the exception of the pass."""
        mine: _Question[Q, A] = _Question(content, later)
        self._waiting.append(mine)
        try:
            while mine.answer is None:  # a pass that a `later` question runs may answer only other questions
                async with self._model_is_free:
                    if mine.answer is None:  # else another caller's pass answered it while this one waited
                        asked = [question for question in self._waiting if not question.later] or list(self._waiting)
                        answers = await self._answer_all([question.content for question in asked])
                        for question, answer in zip(asked, answers, strict=True):
                            question.answer = answer
                        self._waiting = [question for question in self._waiting if question.answer is None]
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
        assert mine.answer is not None
        return mine.answer


def require_one_sequence(samples: Iterable[Sample], user: str) -> None:
    """Raise ConfigError if an episode has several sequences, which `user` ("a critic") cannot take."""
    for sample in samples:
        if sample.branches:
            raise ConfigError(
                f"sample {sample.sample_id!r} has {len(sample.sequences)} sequences, because its context was "
                f"rewritten, but {user} takes samples of one; set history='append' of the Environment, or let the "
                "agent go on from the messages that it sent before"
            )

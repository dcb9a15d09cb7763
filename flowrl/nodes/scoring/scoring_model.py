"""The common part of nodes that score with one model: where the model is, and how it leaves a GPU that is shared.

A node that shares a GPU (`g.time_share`) loads its model into host memory, moves it to the GPU when it may use the GPU,
and moves it back afterwards. So at any time only one of these models is on the device. A node with several GPUs shards
its model over them, with one process for each GPU (`flowrl.training.scoring_models`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from flowrl.errors import ConfigError
from flowrl.graph.node import Footprint, Node, Share
from flowrl.messages import Sample
from flowrl.models import Policy, check_model, known_directory, resolve
from flowrl.models.model_layout import layout_note, scoring_layout
from flowrl.nodes.model_memory import scoring_footprint
from flowrl.training.layouts import explain_refused_tree
from flowrl.training.model.trainable import check_policy, check_scalar
from flowrl.training.settings import Dtype, Layout

if TYPE_CHECKING:
    from flowrl.training.scoring_models import ModelLoad, ScoringModel


R = TypeVar("R")


class ScoringNode(Node):
    """A node with one model, which is loaded in `setup`. Subclasses use it with `score_items`.

    One pass takes at most `token_budget` tokens, padding included, or a single longer sequence. At most `batch` samples
    wait for a pass at the same time. Logits are divided by `temperature`.
    """

    cpus = 1
    head: Literal["lm", "scalar"] = "lm"
    scoring: Any = None
    """A ScoringModel. Annotated as Any: ports are found by evaluating annotations, and its module imports torch."""

    def __init__(
        self,
        policy: Policy,
        *,
        dtype: Dtype,
        token_budget: int,
        layout: Layout,
        batch: int = 1,
        temperature: float = 1.0,
    ) -> None:
        self.policy = policy
        self.dtype: Dtype = dtype
        self.token_budget = token_budget
        self.layout: Layout = layout
        self.batch = batch
        self.temperature = temperature

    @property
    def scored_by(self) -> Policy:
        """The model that the node loads."""
        return self.policy

    @property
    def replica_name(self) -> str:
        return f"{self.name}/{self.context.replica}"

    # Declarations for the graph

    def footprint(self, share: Share) -> Footprint | None:
        return scoring_footprint(self.scored_by, share, self.dtype, self.token_budget)

    def check(self, facts: Any) -> list[str]:
        refused = explain_refused_tree(self.layout, scoring_layout(self.scored_by, self.layout))
        return [*self.number_problems(), *refused]

    def number_problems(self) -> list[str]:
        """What is wrong with the numbers among the settings, as complete sentences."""
        problems = []
        if self.temperature <= 0:
            problems.append(f"temperature is {self.temperature}; it has to be above 0, and the generator's")
        for name in ("token_budget", "batch"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}; it needs at least 1")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            whole = int(self.gpus)
            problems.append(f"gpus is {self.gpus:g}; a model is sharded over whole GPUs, so use {whole} or {whole + 1}")
        return problems

    def notes(self) -> list[str]:
        return [layout_note(scoring_layout(self.scored_by, self.layout))]

    def preflight(self) -> str | None:
        check_model(self.scored_by)
        if (model_dir := known_directory(self.scored_by)) is not None:
            check = check_scalar if self.head == "scalar" else check_policy
            check(model_dir, trust_remote_code=self.scored_by.trust_remote_code)
        return None

    # Lifecycle

    def preload(self) -> None:
        import flowrl.training.scoring_models  # noqa: F401  # for later

    async def setup(self) -> None:
        await self.blocking(self.load_model)

    def load_model(self) -> None:
        """Find the model and load it; blocking."""
        source = resolve(self.policy, progress=self.context.progress)
        from flowrl.training.scoring_models import ModelLoad

        trusted = self.policy.trust_remote_code
        self.open_model(ModelLoad(source, self.head, dtype=self.dtype, trust_remote_code=trusted, layout=self.layout))

    def open_model(self, load: ModelLoad) -> ScoringModel:
        """Load the model; blocking."""
        import torch

        torch.set_num_threads(max(1, len(self.context.cores)))
        model = open_scoring_model(load, self.context.gpus, self.load_device, threads=len(self.context.cores))
        self.scoring = model
        return model

    @property
    def load_device(self) -> str:
        """Where `setup` puts the model: on the GPU, unless the node shares the GPU with others."""
        return "cuda" if self.context.gpus and not self.context.time_shared else "cpu"

    def score_items(self, one: Callable[..., list[R]], items: Sequence[Any], *args: Any) -> list[R]:
        """The result of the pass `one` (`flowrl.training.scoring_models`) for each item; blocking."""
        from flowrl.training.scoring_models import score_items

        assert self.scoring is not None, "`setup` opens it"
        return score_items(self.scoring, one, items, *args, token_budget=self.token_budget)

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


Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(eq=False)
class _Question(Generic[Q, A]):
    content: Q
    later: bool
    answer: A | None = None


class SharedPass(Generic[Q, A]):
    """Answers concurrent questions: the first caller that finds the model free runs a pass for all waiting questions.

    `answer_all(questions)` returns one answer per question, none of which is None; it is blocking, and `activity` is
    the name of the time that `node` spends in it. Each wait ends with the pass that answers the question. If a pass is
    cancelled, the other questions keep waiting for the next pass. A question that is asked `later` is answered by the
    first pass that starts when only questions of that kind wait.
    """

    def __init__(self, node: Node, activity: str, answer_all: Callable[[list[Q]], Sequence[A]]) -> None:
        self._node = node
        self._activity = activity
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
                        with self._node.context.busy(self._activity):
                            contents = [question.content for question in asked]
                            answers = await self._node.blocking(self._answer_all, contents)
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

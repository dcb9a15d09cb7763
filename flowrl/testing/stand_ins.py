"""Stand-ins for what is heavy in nodes: vLLM, the model in training, models that score, and the transport of weights.

`stand_in(graph)` puts them into a graph's own nodes. Everything else of these nodes stays: how a generator follows
weights, continues a response after a checkpoint and answers turns, how a trainer lays out a batch and calls the loss,
what is booked in the ledger. Nodes without anything heavy are not touched: rewards, losses and users' nodes are real.

What a stand-in makes up depends on seeds only. Half of the responses are the answer of the prompt's row, so that
rewards differ within a group. The model in training has one weight; each token's logprob depends on it, so a loss has
a gradient. Work is made small: a trainer has one rank and makes at most one version without an update, an optimizer
step has at most NUM_GROUPS groups, an evaluation NUM_ASKED prompts.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.graph.analysis.numbers import derive_numbers
from flowrl.graph.analysis.size_rules import most_asked
from flowrl.graph.graph import Graph
from flowrl.graph.node import Node, Saved
from flowrl.messages import Bool, Float32, Int32, Prompt, Sample, Weights
from flowrl.messages.sampling import ReplySchema, Sampling
from flowrl.models import known_tokenizer, tokenizer_of
from flowrl.nodes.evaluation import Evaluation
from flowrl.nodes.generation.completions import NOTHING, Completion
from flowrl.nodes.generation.generator import Generator
from flowrl.nodes.groups.batch import TokenBatch
from flowrl.nodes.scoring.critic import Critic
from flowrl.nodes.scoring.preference_reference import PreferenceReference
from flowrl.nodes.scoring.reference import KeptReferences, Reference, num_kept
from flowrl.nodes.scoring.reward_model import RewardModel
from flowrl.nodes.scoring.scoring_model import ScoringNode
from flowrl.nodes.sources.row_source import RowSource
from flowrl.nodes.trainer import Trainer
from flowrl.nodes.writers import LineWriter, RemainingPrompts
from flowrl.training.layouts import Placing
from flowrl.training.settings import Layout, LoRA
from flowrl.weights.receive import SEGMENT_ENGINE, Fetched

NUM_ASKED = 8
"""Prompts of an evaluation, and of a source in a graph without trainer."""
NUM_GROUPS = 2
"""Groups of an optimizer step."""
PIECE = 4
"""Tokens that a response grows by at a time; between two pieces it may be paused, saved, or get new weights."""
MEAN_LOGPROB = -1.0
TRANSPORT = "stand-in:"
STATE = "weight.json"


def do_nothing(self: object, *args: Any, **options: Any) -> None:
    """A method of a stand-in for something that has no process, no device and no transport."""


async def await_nothing(self: object, *args: Any) -> None:
    """As `do_nothing`, for a method that is awaited."""


class StandInSampler:
    """In place of `VllmSampler`: makes up short responses in the tokens of the policy."""

    dtype = "float32"
    max_model_len = 1 << 20

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.answers: dict[str, str] = {}
        """Sample -> the answer of its prompt's row."""
        self._version = -1
        self._running: dict[str, Completion] = {}
        self._unpaused = asyncio.Event()

    @asynccontextmanager
    async def required(self) -> Any:
        """There is no process that could end."""
        yield

    async def complete(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        generated: int = 0,
        seed: int | None = None,
        salt: str = "",
        priority: int = 0,
        schema: ReplySchema | None = None,
    ) -> Completion:
        """A short text in pieces, each with the version that is there when it comes; by a schema of choices or JSON."""
        draw = random.Random(f"{seed}/{generated}")
        answer = self.answers.get(request_id.rpartition("#")[0], "")
        text = answer if answer and draw.random() < 0.5 else str(draw.randrange(200))
        if schema is not None:
            text = draw.choice(schema.choice or (json.dumps(_example_of(schema.json or {"type": "integer"})),))
        ids: list[int] = [*self.tokenizer.encode(text, add_special_tokens=False)]
        ids += [ids[-1]] * (sampling.min_tokens - generated - len(ids) - 1)
        ids.append(self.tokenizer.eos_token_id)
        most = sampling.max_tokens - generated
        whole, self._running[request_id] = ids[:most], NOTHING
        try:
            for start in range(0, len(whole), PIECE):
                await asyncio.sleep(0)
                await self._unpaused.wait()
                self._add_piece(request_id, whole[start : start + PIECE], draw)
            reason, done = "stop" if len(ids) <= most else "length", self._running[request_id]
            if not sampling.num_top:
                return replace(done, finish_reason=reason)
            shape = (len(done.token_ids), sampling.num_top)
            top = np.broadcast_to(done.logprobs[:, None] - np.arange(shape[1], dtype=np.float32), shape)
            return replace(done, finish_reason=reason, top_ids=np.zeros(shape, np.int32), top_logprobs=top)
        finally:
            del self._running[request_id]

    def _add_piece(self, request_id: str, piece: list[int], draw: random.Random) -> None:
        before = self._running[request_id]
        logprobs = [MEAN_LOGPROB - 0.2 * draw.random() for _ in piece]
        self._running[request_id] = Completion(
            np.concatenate([before.token_ids, np.array(piece, np.int32)]),
            np.concatenate([before.logprobs, np.array(logprobs, np.float32)]),
            np.concatenate([before.versions, np.full(len(piece), self._version, np.int32)]),
            "",
        )

    def so_far(self, request_id: str) -> Completion | None:
        return self._running.get(request_id, NOTHING)

    async def score_sequences(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[MEAN_LOGPROB] * (len(sequence) - 1) for sequence in sequences]

    async def pause(self) -> None:
        self._unpaused.clear()

    async def resume(self) -> None:
        self._unpaused.set()

    async def label_tokens(self, version: int) -> None:
        self._version = version

    async def load_version(self, update: Mapping[str, Any], manifest: Weights) -> float:
        return 0.0

    def decode_text(self, token_ids: Int32) -> str:
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    close = do_nothing
    listen = join_transfer = wait_for_room = sleep = wake = await_nothing


def _example_of(schema: Mapping[str, Any]) -> Any:
    """A value that a simple JSON schema allows."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "object" or "properties" in schema:
        return {name: _example_of(one) for name, one in schema.get("properties", {}).items()}
    if schema.get("type") == "array":
        return [_example_of(schema.get("items", {}))]
    return {"string": "a", "boolean": True, "number": 1.0, "null": None}.get(schema.get("type", ""), 1)


class StandInReceiver:
    """In place of a `Receiver`: every version is there."""

    engine = SEGMENT_ENGINE

    def join_engine(self, manifest: Weights) -> Mapping[str, Any] | None:
        return None

    def fetch_version(self, manifest: Weights) -> Fetched:
        return Fetched({}, lambda: None)

    close = do_nothing


class StandInGenerator(Generator):
    """A Generator without vLLM."""

    async def _open_engine(self) -> Any:
        tokenizer = await self.blocking(lambda: known_tokenizer(self.policy) or tokenizer_of(self.policy))
        return StandInReceiver(), StandInSampler(tokenizer)

    async def _sample_prompt(self, prompt: Prompt, sampling: Sampling, priority: int) -> Sample:
        sampler: Any = self._sampler
        sampler.answers[prompt.sample_id] = str(prompt.columns.get("answer", ""))
        try:
            return await super()._sample_prompt(prompt, sampling, priority)
        finally:
            del sampler.answers[prompt.sample_id]


class StandInPublisher:
    """In place of a `Publisher`: announces versions, whose weights are nowhere."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._content = -1

    def publish_version(self, version: int, kind: str = "full") -> Weights:
        if kind == "full" or self._content < 0:
            self._content = version
        return Weights(self._policy, version, self._content, kind, TRANSPORT, 0, 0)

    close = transmit_tensors = do_nothing


class StandInTrainer(Trainer):
    """A Trainer of a model with one weight; the loss is the graph's."""

    def _open_engine(self) -> Any:
        resumed = self.context.resume_dir
        state = None if resumed is None else self._state_dir(resumed)
        layout = "padded" if self._layout.layout == "rows" else self._layout.layout
        return StandInEngine(self.lora, layout, state, balanced=self.router_aux_loss_coef > 0)

    _load_teacher = do_nothing  # the model has no output layer to compare with

    def _make_publisher(self, engine: Any) -> Any:
        return StandInPublisher(self.name)

    def check_resume(self, saved: Saved) -> list[str]:
        return []


class StandInEngine:
    """In place of a `ZeroEngine`: a model whose one weight is added to every logprob and value.

    Axes: N policy tokens of a micro-batch.
    """

    def __init__(self, lora: LoRA, layout: Placing, resumed: Path | None, *, balanced: bool) -> None:
        import torch

        from flowrl.training.engine.gang import Gang

        self.gang = Gang(0, 1, torch.device("cpu"))
        self.device = self.gang.device
        self.lora = lora
        self.layout: Placing = layout
        self._balanced = balanced
        weight = 0.0 if resumed is None else json.loads((resumed / STATE).read_text(encoding="utf-8"))["weight"]
        self._weight = torch.tensor([weight], requires_grad=True)
        self._lr = 0.0

    def forward(self, rows: Any, *, temperature: float, entropy_gradient: bool = False) -> tuple[Any, Any]:
        logprobs_N, entropies_N, *_ = self.compute_outputs(rows, temperature, entropy_gradient)
        return logprobs_N, entropies_N

    def compute_outputs(self, rows: Any, temperature: float, entropy_gradient: bool) -> tuple[Any, ...]:
        logprobs_N = MEAN_LOGPROB - 0.01 * (rows.targets_N % 7) + self._weight
        entropies_N = 1.0 + 0.1 * (logprobs_N if entropy_gradient else logprobs_N.detach())
        balance = [self._weight.square().sum()] if self._balanced and logprobs_N.requires_grad else []
        return logprobs_N, entropies_N, *balance

    def compute_values(self, rows: Any) -> Any:
        return 0.01 * (rows.places_N % 7) + self._weight

    def num_computed(self, rows: Any) -> int:
        return int(rows.num_computed)

    def add_gradient(self, loss: Any, *, last: bool) -> None:
        loss.backward()

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """The model without an adapter is the same."""
        yield

    def set_lr(self, lr: float) -> None:
        self._lr = lr

    def step_optimizer(self, *, divide_by: float = 1.0) -> Any:
        """A step against the sign of the gradient."""
        import torch

        from flowrl.training.engine.zero import ZeroStep

        grad, self._weight.grad = self._weight.grad, None
        norm = 0.0 if grad is None else abs(float(grad)) / divide_by
        if not math.isfinite(norm):
            return ZeroStep(False, math.inf)
        if grad is not None:
            with torch.no_grad():
                self._weight -= self._lr * grad.sign()
        return ZeroStep(True, norm)

    record_scores = do_nothing

    def export_model(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "README.md").write_text(
            "A model that a stand-in for a trainer has made: it has one weight.\n", encoding="utf-8"
        )

    def save_state(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / STATE).write_text(json.dumps({"weight": float(self._weight.detach())}), encoding="utf-8")


class StandInModel:
    """In place of a `ScoringModel`."""

    layout: Layout = "rows"

    @property
    def facts(self) -> dict[str, Any]:
        return {}

    def run(self, one: Any, passes: Sequence[Sequence[Any]], trees: bool, *args: Any) -> Iterator[list[Any]]:
        """Made-up results in the form of those of `one`, a function of `flowrl.training.scoring_models`."""
        make: Any = {"judgements_of": _made_judgement, "scores_of_pass": _made_scores}.get(one.__name__, _made_values)
        return ([make(item) for item in items] for items in passes)

    close = call_everywhere = move_away = come_back = do_nothing


def _made_values(item: tuple[Int32, Bool]) -> Float32:
    token_ids, mask = item
    return np.where(mask, MEAN_LOGPROB - 0.01 * (token_ids % 7), 0.0).astype(np.float32)


def _made_judgement(item: tuple[Int32, Bool]) -> tuple[Float32, Float32]:
    return _made_values(item), np.zeros((int(item[1].sum()), 1), np.float32)


def _made_scores(token_ids: Int32) -> tuple[float, ...]:
    return (float(int(token_ids.sum()) % 11) / 11,)


class StandInScoring(ScoringNode):
    """A node that scores, without its model."""

    def load_model(self) -> None:
        self.scoring = StandInModel()

    def open_model(self, load: Any) -> Any:
        self.scoring = StandInModel()
        return self.scoring


class StandInReward(RewardModel):
    """A RewardModel that has the tokenizer and the labels of its model, and makes up scores."""

    def open_model(self, load: Any) -> Any:
        self.scoring = StandInModel()
        return self.scoring


class StandInReference(StandInScoring, Reference):
    """A Reference without its model. One that follows the policy keeps references of a model with one weight."""

    def _open_references(self) -> KeptReferences:
        from torch import nn

        num = num_kept(self.refresh_every, self.context.max_staleness)
        self._one_weight = nn.Linear(1, 1)
        kept = KeptReferences(self._one_weight, every=self.refresh_every, mixup=self.mixup, kept=num)
        if self.context.resume_dir is not None:
            kept.restore_references(self._state_dir(self.context.resume_dir))
        return kept

    def _refresh_reference(self, kept: KeptReferences, manifest: Weights) -> None:
        kept.add_reference(manifest.version, dict(self._one_weight.named_parameters()))


class StandInCritic(StandInScoring, Critic):
    """A Critic without its model."""

    _load_version = do_nothing


class StandInLogprobs:
    """In place of a `ReferenceCache`."""

    def read_logprobs(self, token_ids: Int32, mask: Bool) -> Float32:
        return _made_values((token_ids, mask))


class StandInPreferences(StandInScoring, PreferenceReference):
    """A PreferenceReference without its model, and without its cache."""

    def _open_cache(self, sequences: Iterable[tuple[Int32, Bool]]) -> Any:
        return StandInLogprobs()


STAND_INS: tuple[tuple[type[Node], type[Node]], ...] = (
    (Generator, StandInGenerator),
    (Trainer, StandInTrainer),
    (Critic, StandInCritic),
    (Reference, StandInReference),
    (PreferenceReference, StandInPreferences),
    (RewardModel, StandInReward),
    (ScoringNode, StandInScoring),
)
"""What a class and its subclasses get, the first that fits."""


def stand_in(graph: Graph, directory: Path) -> Graph:
    """The graph, with stand-ins in its nodes, and small enough to be tried. What it would write beside its records goes
    to `directory`.

    Its nodes need neither devices nor cores of their own, so all of them share a process.
    """
    trains = any(isinstance(node, Trainer) or node.gang for node in graph.nodes.values())
    for name, node in graph.nodes.items():
        placed = graph.placed[name]
        graph.placed[name] = replace(placed, cpus=0, gpus=0, replicas=1 if node.gang else placed.replicas)
        kind = type(node)
        if (own := next((own for of, own in STAND_INS if isinstance(node, of)), None)) is not None:
            about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            node.__class__ = type(kind.__name__, (own, kind), about)
        _make_small(node, directory, trains=trains, asked=most_asked(graph)[1])
    graph.time_shared = []
    groups = derive_numbers(graph).groups_per_batch
    if graph.admission is not None and groups:
        # A window over several of the smaller batches would age a group by more versions than the staleness allows.
        graph.admission = replace(graph.admission, look_ahead=min(graph.admission.look_ahead, groups))
    return graph


def _make_small(node: Node, directory: Path, *, trains: bool, asked: int) -> None:
    """Let the node do little, and write nothing outside of `directory`.

    `asked` is the number of groups that a group may ask for: there have to be tickets for them.
    """
    if isinstance(node, Trainer):
        node.sequence_parallel_size = node.tensor_parallel_size = 1
        node.start_after = min(node.start_after, 1)  # the loss is called in the second batch
    elif isinstance(node, Evaluation):
        node.num_prompts = min(node.num_prompts, NUM_ASKED)
        node.sets, node.agent_sets = (
            tuple(replace(one, num=min(one.num or NUM_ASKED, NUM_ASKED), at_most=True) for one in sets)
            for sets in (node.sets, node.agent_sets)
        )
    elif isinstance(node, TokenBatch):
        node.num_groups = min(node.num_groups, max(node.optimizer_steps * NUM_GROUPS, asked))
    elif isinstance(node, LineWriter):
        node.path = str(directory / "written.jsonl")
    elif isinstance(node, RowSource) and not trains:
        node.num_prompts = min(node.num_prompts or NUM_ASKED, NUM_ASKED)
    if isinstance(node, RemainingPrompts):
        node.out = str(directory / "written.jsonl")

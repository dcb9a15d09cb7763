"""Blocks of options that graphs share, the nodes made from them, and evaluation.

The configuration of a graph inherits the blocks that it needs and adds its own options:

    @dataclass(frozen=True)
    class RLOO(OnlineOptions):
        kl_coef: float = 0.001

A subclass may give an option another default, but not another meaning. It inherits the help text unless it
writes a new one. With several bases, `--help` lists the options of the last base first. Values out of range
raise ConfigError when the options are made.

Blocks make the nodes that take many options. The graph file says which node is connected to which; of the
functions here, only `refer`, `evaluate` and `evaluate_offline` connect nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar, cast

from flowrl.episode import Episode
from flowrl.graph.graph import Graph, OnLimit, carried
from flowrl.graph.ports import In, Out
from flowrl.messages import Sample, Weights
from flowrl.models.sizes.model_layout import trainer_layout
from flowrl.models.sizes.size_table import Learning
from flowrl.nodes import (
    Evaluation,
    Generator,
    Preferences,
    PromptLimit,
    PromptSource,
    RewardModel,
    RowPart,
    Sampling,
    TokenBatch,
    TooLong,
    Trainer,
)
from flowrl.nodes.scoring.reference import EpisodeReference, Reference
from flowrl.policy_options import AnswerOptions, GeneratorOptions, PolicyOptions, SamplingOptions, TruncationOptions
from flowrl.role_options import ReferenceSize, ScoringSize, TimedReward, TrainerSize, too_low, unused
from flowrl.tasks import Task
from flowrl.tasks.evaluation_set import EvaluationSet
from flowrl.training.loss.objective import Objective
from flowrl.training.settings import Accumulate, Dtype, Layout, LoRA, Schedule, ZeroSettings

__all__ = (
    "AnswerOptions",
    "DatasetOptions",
    "EvaluationOptions",
    "GeneratorOptions",
    "OnlineOptions",
    "PolicyOptions",
    "PreferenceOptions",
    "SamplingOptions",
    "TrainerOptions",
    "TruncationOptions",
    "evaluate",
    "evaluate_offline",
    "refer",
)
S = TypeVar("S", bound=Sample)
ANSWERING = ("generator", "engine", "stop_strings", "probe_tolerance", "reward_timeout_s")
"""Options that only evaluations use in a graph that samples nothing else."""


@dataclass(frozen=True)
class TrainerOptions(PolicyOptions):
    """Options of graphs that train the policy."""

    lr: float = 1e-4
    """Peak learning rate of the policy."""
    trainer: TrainerSize = TrainerSize()
    """Ranks of the policy's trainer."""
    dtype: Dtype = "float32"
    """Data type of parameters and activations."""
    token_budget: int = 8192
    """Maximum number of tokens in a micro-batch, padding included. A prefix that samples share counts once if the
    layout of `zero` lets the trainer compute it once. Preference pairs are never split."""
    lora: LoRA = LoRA()
    """Train adapters of the policy instead of all its weights, as with --lora.rank 16."""
    zero: ZeroSettings = ZeroSettings()
    """Sharding, offload, optimizer, attention and layout of the policy's trainer."""
    schedule: Schedule = Schedule()
    """Warm-up and decay of the learning rate."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts (arXiv 2101.03961), added to the objective's loss; 0:
    none."""
    accumulate: Accumulate = "auto"
    """Start backward passes on the first groups of a batch while the others are still on their way. auto: only if
    nothing but rounding differs and the groups do not all arrive together. `flowrl check` says whether this is done
    and, if not, why."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, token_budget=1, router_aux_loss_coef=0)
        if not 0 <= self.lr < math.inf:
            yield f"--lr is {self.lr}; it has to be a finite number of at least 0"
        yield from self.unused_settings("zero", "schedule")
        if not self.lora.rank:
            yield from unused(self, ("lora",), "all weights are trained; give --lora.rank too")

    def unused_settings(self, zero: str, schedule: str) -> Iterator[str]:
        """A sentence for the settings in the blocks `zero` and `schedule` that one trainer's optimizer or schedule does
        not have."""
        optimizer: str = getattr(self, zero).optimizer
        theirs = {"muon": (f"{zero}.momentum", f"{zero}.muon_lr_factor"), "adamw": (f"{zero}.betas", f"{zero}.eps")}
        for name in {"adamw": ("muon",), "sgd": ("muon", "adamw")}.get(optimizer, ()):
            yield from unused(
                self, theirs[name], f"{optimizer} has no such setting, only {name} has it; leave this out"
            )
        if getattr(self, schedule).decay == "constant":
            why = f"the rate does not fall; give --{schedule.replace('_', '-')}.decay too"
            yield from unused(self, (f"{schedule}.floor",), why)

    @property
    def packed_as(self) -> Layout:
        """How the trainer's batches are packed: as trees only if the trainer can compute trees."""
        return trainer_layout(self.model, self.zero, self.trainer.sequence_parallel_kind).layout

    def make_trainer(self, objective: Objective, **settings: Any) -> Trainer:
        """A trainer of the policy; `settings` are further arguments of `Trainer`."""
        return Trainer(
            self.model,
            objective=objective,
            lr=self.lr,
            schedule=self.schedule,
            zero=self.zero.with_dtype(self.dtype),
            lora=self.lora,
            sequence_parallel_size=self.trainer.sequence_parallel_size,
            sequence_parallel_kind=self.trainer.sequence_parallel_kind,
            tensor_parallel_size=self.trainer.tensor_parallel_size,
            router_aux_loss_coef=self.router_aux_loss_coef,
            accumulate=self.accumulate,
            **settings,
        )

    def scoring(self, size: ScoringSize) -> dict[str, Any]:
        """Arguments of a node whose model only scores: the values of its role, or else those of the trainer."""
        return {
            "dtype": size.dtype or self.dtype,
            "token_budget": size.token_budget or self.token_budget,
            "layout": self.zero.layout,
        }


@dataclass(frozen=True)
class EvaluationOptions(TimedReward, TrainerOptions, GeneratorOptions):
    """Options of graphs that measure the trained policy on held-out prompts."""

    evaluate: int = 512
    """Number of held-out prompts answered before and after training. 0: none, and all rows of a file are trained on,
    except in agent_tools."""
    evaluate_samples: int = 1
    """Number of answers to each held-out prompt: a single one is greedy, several are sampled."""
    evaluate_every: int = 0
    """Steps between evaluations during training; 0: none."""
    evaluate_also: tuple[str, ...] = ()
    """Further tasks to evaluate, each scored by its own verifier."""
    evaluate_task: tuple[str, ...] = ()
    """Evaluate on all rows of these files or splits, and train on all rows of --task: test.jsonl:check=math, or with a
    name and its own numbers gsm8k=test.jsonl:check=math,num=500,samples=4,temperature=0.6. --evaluate is then
    ignored."""
    evaluate_max_prompt_tokens: int | None = None
    """Maximum number of tokens in a held-out prompt; None: the limit of training prompts, or the model's context if
    they have no limit. Longer prompts are left out and counted, or treated as --too-long says."""
    probe_tolerance: float | None = None
    """Largest mean difference between a generator's logprobs of fixed sequences and the trainer's; None: by dtype."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, evaluate=0, evaluate_samples=1, evaluate_every=0, probe_tolerance=0)
        yield from too_low(self, evaluate_max_prompt_tokens=1)
        yield from self.timeout_problems()
        names = [one.name for one in self.evaluation_sets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"--evaluate-task has two sets named {twice[0]}; give one another name, as in other=FILE"
        if not self.evaluates:
            why = "nothing is evaluated, for --evaluate is 0; leave this out, or ask held-out prompts: --evaluate 256"
            yield from unused(self, self.of_evaluations, why)
        elif self.evaluate_also and not self.evaluate:
            yield "--evaluate-also asks --evaluate held-out rows of each task, and --evaluate is 0; give a number"

    @property
    def held_out_prompts(self) -> PromptLimit:
        """How long a held-out prompt may be."""
        return PromptLimit(self.evaluate_max_prompt_tokens, engine=self.engine.max_model_len)

    @property
    def evaluates(self) -> bool:
        """Whether the policy is evaluated."""
        return bool(self.evaluate or self.evaluate_task)

    @property
    def of_evaluations(self) -> tuple[str, ...]:
        """The options that only evaluations use; they are refused in a run without evaluations."""
        return "evaluate_samples", "evaluate_every", "evaluate_also", "evaluate_max_prompt_tokens"

    @property
    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """The sets of --evaluate-task."""
        return tuple(
            EvaluationSet.parse(text, like=self.held_out_task, samples=self.evaluate_samples)
            for text in self.evaluate_task
        )

    @property
    def held_out_task(self) -> Task:
        """--task with the reward that scores held-out answers."""
        return self.task

    @property
    def trained_part(self) -> RowPart:
        """The rows of --task that are trained on: all of a file, unless some are held out for the evaluation."""
        return "all" if self.evaluate_task or not (self.evaluate or self.task.generated) else "train"

    def make_generator(self, sampling: Sampling, **settings: Any) -> Generator:
        """A generator of the policy. It also answers held-out prompts, with `sampling` if each has several answers.

        `settings` are further arguments of `Generator`.
        """
        several = self.evaluate_samples > 1 or any(one.samples > 1 for one in self.evaluation_sets)
        evaluation = sampling if several else None
        return Generator(
            self.model,
            sampling=sampling,
            evaluation=evaluation,
            lora=self.lora,
            engine=self.engine,
            probe_tolerance=self.probe_tolerance,
            **settings,
        )


@dataclass(frozen=True)
class OnlineOptions(EvaluationOptions, SamplingOptions):
    """Options of graphs that train the policy on its own samples."""

    staleness: int = 1
    """Largest staleness of any trained token, in versions. 0 is synchronous."""
    on_limit: OnLimit = "wait"
    """At the staleness limit, generation waits (wait), or tokens older than the limit are masked out of the loss
    (mask)."""
    look_ahead: int = 1
    """Number of groups among which the batcher may choose a finished one; 1: groups are taken in admission order."""
    groups_per_step: int = 16
    """Number of prompts in one batch."""
    optimizer_steps: int = 1
    """Mini-batches into which a batch is split."""
    epochs: int = 1
    """Passes over each batch."""
    negate_rewards: bool = False
    """A control experiment: the sign of every reward is changed, so the policy must get worse."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, staleness=0, look_ahead=1, groups_per_step=1, optimizer_steps=1, epochs=1)

    def batcher(self, **settings: Any) -> TokenBatch:
        """A batcher of groups; `settings` are further arguments of `TokenBatch`."""
        return TokenBatch(
            self.groups_per_step,
            token_budget=self.token_budget,
            layout=self.packed_as,
            optimizer_steps=self.optimizer_steps,
            sources=self.task.source_names,
            **settings,
        )

    def make_trainer(self, objective: Objective, **settings: Any) -> Trainer:
        """A trainer of the policy for samples with this temperature; `settings` are further arguments of `Trainer`."""
        return super().make_trainer(objective, temperature=self.temperature, epochs=self.epochs, **settings)


@dataclass(frozen=True)
class DatasetOptions(TrainerOptions):
    """Options of graphs that train the policy on a dataset."""

    learning: ClassVar[Learning] = "rows"

    batch: int = 64
    """Number of rows in one step."""
    epochs: int | None = None
    """Passes over the data; None: as many as the given number of steps needs, or one if no number of steps is given."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, batch=1, epochs=1)


@dataclass(frozen=True)
class PreferenceOptions(DatasetOptions):
    """Options of graphs that train the policy on preferences."""

    learning: ClassVar[Learning] = "preferences"

    max_length: int = 1024
    """Maximum number of tokens in a conversation."""
    too_long: TooLong = "drop"
    """Longer conversations are dropped and counted, lose their beginning, or are an error before training."""
    held_out: int = 256
    """Held-out rows on which accuracy and changes of logprobs are measured; 0: none."""
    judge_every: int = 10
    """Steps between these measurements; 0: only before and after training."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, max_length=2, held_out=0, judge_every=0)
        if not self.held_out:
            yield from unused(self, ("judge_every",), "there is nothing to measure on, for --held-out is 0")

    def preferences(self, rows: str, kind: Literal["pairs", "labelled"] = "pairs") -> Preferences:
        """The preferences in `rows`, a file or dataset; if `rows` is empty, the task's own."""
        task = replace(self.task, name=rows) if rows else self.task
        return Preferences(task, self.model, kind=kind, max_tokens=self.max_length, too_long=self.too_long)


def refer(
    g: Graph,
    cfg: OnlineOptions,
    size: ReferenceSize | None,
    rollouts: Out[S],
    trainer: Trainer,
    *,
    placed: Mapping[str, Any] | None = None,
) -> tuple[Out[S], tuple[In[Weights], ...]]:
    """Pass `rollouts` through a reference of the given size, for a KL in the reward or the loss. Without a size, add
    none.

    `placed` are the arguments of `Graph.add`; None: those for the size. Returns the port to connect to the next node,
    and further ports that the graph has to pass to `Graph.admit` as `until`.
    """
    if size is None:
        return rollouts, ()
    kind = EpisodeReference if issubclass(carried(rollouts), Episode) else Reference
    initial = kind(cfg.model, temperature=cfg.temperature, **cfg.scoring(size), **size.refreshed)
    reference = g.add("reference", initial, **(cfg.place(size) if placed is None else placed))
    g.connect(cast(Out[Sample], rollouts), reference.rollouts)
    if size.refresh_every:
        g.latest(trainer.weights, reference.weights)
    followers = (reference.weights,) if size.refresh_every else ()
    return cast(Out[S], reference.referenced), followers


def evaluate(g: Graph, cfg: EvaluationOptions, generator: Generator, *, text: bool = False) -> None:
    """Add the evaluation node, whose prompts `generator` answers, unless `cfg` asks for no evaluation.

    `text`: the trained task has texts and no prompts. If the reward of held-out answers names a reward model, they are
    scored by the one that the graph has.
    """
    if not cfg.evaluates:
        return
    sets = cfg.evaluation_sets
    held_out = Evaluation(
        () if sets else cfg.held_out_task,
        cfg.model,
        num_prompts=max(1, cfg.evaluate),
        num_samples=cfg.evaluate_samples,
        every=cfg.evaluate_every,
        also=cfg.evaluate_also if cfg.evaluate else (),
        sets=sets,
        training=None if text or isinstance(cfg, PreferenceOptions) else cfg.task,
        prompt_limit=cfg.held_out_prompts,
        concurrency=generator.engine.concurrency * g.placed[generator.name].replicas,
        **cfg.held_out_asking,
    )
    evaluation = g.add("evaluation", held_out)
    g.call(evaluation.generate, generator.requests)
    for scorer in (node for node in g.nodes.values() if isinstance(node, RewardModel) and held_out.asks_model):
        g.call(evaluation.score, scorer.requests)


def evaluate_offline(
    g: Graph, cfg: EvaluationOptions, *, trainer: Trainer, prompts: PromptSource, sampling: Sampling, text: bool = False
) -> None:
    """`evaluate` for a graph without a generator: adds one, with `sampling`, that gets the trainer's weights.

    The groups of `prompts` then need tickets, because the generator's version has to be known. If `cfg.evaluate`
    is 0, nothing is added and the trainer's weights are ignored.
    """
    if not cfg.evaluates:
        g.ignore(trainer.weights)
        return
    generator = g.add("generator", cfg.make_generator(sampling), **cfg.place_generator())
    evaluate(g, cfg, generator, text=text)
    g.latest(trainer.weights, generator.weights)
    g.admit(prompts.prompts, until=generator.weights, staleness=1)
    g.ignore(generator.prompts)
    g.ignore(generator.rollouts)

"""The parts of graphs that train the policy: its trainer, its data if nothing is sampled, and its evaluation.

`add_evaluation` and `add_offline_evaluation` add the evaluation to a graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from flowrl.graph.graph import Graph
from flowrl.graph.option_types import named, value_of
from flowrl.graph.ports import Serve
from flowrl.messages import Prompt, Sample
from flowrl.models import Policy
from flowrl.models.model_layout import trainer_layout
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
from flowrl.options.graph_config import ConfigPart, DataOptions, GeneratorOptions, GraphConfig, SamplingOptions
from flowrl.options.reward_parts import TimedReward
from flowrl.options.sizes import ScoringSize, TrainerSize, find_unused, too_low
from flowrl.tasks import Task
from flowrl.tasks.evaluation_set import EvaluationSet
from flowrl.training.loss.objective import Objective
from flowrl.training.settings import Accumulate, Dtype, Layout, LoRA, Schedule, ZeroSettings

ANSWERING = ("generator", "engine", "stop_strings", "probe_tolerance", "reward_timeout_s")
"""Options that only evaluations use in a graph that samples nothing else."""


@dataclass(frozen=True)
class TrainerOptions(ConfigPart):
    """The policy's trainer."""

    lr: float = 1e-4
    """Peak learning rate of the policy."""
    size: TrainerSize = named("trainer", TrainerSize())
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

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        yield from unused_settings(cfg, "zero", "schedule")
        if not self.lora.rank:
            yield from find_unused(cfg, ("lora",), "all weights are trained; give --lora.rank too")

    def layout(self, policy: Policy) -> Layout:
        """How batches are packed: as trees only if the trainer can compute trees."""
        return trainer_layout(policy, self.zero, self.size.sequence_parallel_kind).layout

    def build(self, policy: Policy, objective: Objective, **settings: Any) -> Trainer:
        """A trainer of the policy; `settings` are further arguments of `Trainer`."""
        return Trainer(
            policy,
            objective=objective,
            lr=self.lr,
            schedule=self.schedule,
            zero=self.zero.with_dtype(self.dtype),
            lora=self.lora,
            sequence_parallel_size=self.size.sequence_parallel_size,
            sequence_parallel_kind=self.size.sequence_parallel_kind,
            tensor_parallel_size=self.size.tensor_parallel_size,
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


def unused_settings(cfg: GraphConfig, zero: str, schedule: str) -> Iterator[str]:
    """A sentence for the settings in the blocks `zero` and `schedule` that one trainer's optimizer or schedule does
    not have."""
    optimizer: str = value_of(cfg, zero).optimizer
    theirs = {"muon": (f"{zero}.momentum", f"{zero}.muon_lr_factor"), "adamw": (f"{zero}.betas", f"{zero}.eps")}
    for name in {"adamw": ("muon",), "sgd": ("muon", "adamw")}.get(optimizer, ()):
        yield from find_unused(
            cfg, theirs[name], f"{optimizer} has no such setting, only {name} has it; leave this out"
        )
    if value_of(cfg, schedule).decay == "constant":
        why = f"the rate does not fall; give --{schedule.replace('_', '-')}.decay too"
        yield from find_unused(cfg, (f"{schedule}.floor",), why)


@dataclass(frozen=True)
class EpochOptions(ConfigPart):
    """How the rows of a dataset make steps."""

    batch: int = 64
    """Number of rows in one step."""
    epochs: int | None = None
    """Passes over the data; None: as many as the given number of steps needs, or one if no number of steps is given."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, batch=1, epochs=1)

    def build(self, trainer: TrainerOptions, policy: Policy) -> TokenBatch:
        """The node that makes batches for a trainer of the policy."""
        return TokenBatch(self.batch, token_budget=trainer.token_budget, layout=trainer.layout(policy))


@dataclass(frozen=True)
class PreferenceData(DataOptions):
    """Preferences, which are the data, and the task to evaluate."""

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

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        if not self.held_out:
            yield from find_unused(cfg, ("judge_every",), "there is nothing to measure on, for --held-out is 0")

    def build(self, policy: Policy, rows: str, kind: Literal["pairs", "labelled"] = "pairs") -> Preferences:
        """The preferences in `rows`, a file or dataset; if `rows` is empty, the task's own."""
        task = replace(self.task, name=rows) if rows else self.task
        return Preferences(task, policy, kind=kind, max_tokens=self.max_length, too_long=self.too_long)


@dataclass(frozen=True)
class PromptData(DataOptions):
    """The prompts of a task."""

    max_prompt_tokens: int = 512
    """Maximum number of tokens in a prompt."""
    too_long: TooLong = "drop"
    """Prompts over the limit are dropped and counted, lose their beginning, or are an error before training."""
    num_prompts: int | None = None
    """Number of prompts of the task to train on, from the first; a mixture divides it by weight. None: all."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, max_prompt_tokens=1, num_prompts=1)

    def build(self, policy: Policy, *, group_size: int, **settings: Any) -> PromptSource:
        """The source of groups of `group_size` prompts, rendered for `policy`; `settings` are further arguments of
        it."""
        return PromptSource(
            self.task,
            policy,
            repeat=group_size,
            num_prompts=self.num_prompts,
            max_prompt_tokens=self.max_prompt_tokens,
            too_long=self.too_long,
            **settings,
        )


@dataclass(frozen=True)
class EvaluationOptions(ConfigPart):
    """The evaluation of the trained policy on held-out prompts."""

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

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        names = [one.name for one in self.sets(cfg)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"--evaluate-task has two sets named {twice[0]}; give one another name, as in other=FILE"
        if not self.evaluates:
            why = "nothing is evaluated, for --evaluate is 0; leave this out, or ask held-out prompts: --evaluate 256"
            yield from find_unused(cfg, cfg.of_evaluations, why)
        elif self.evaluate_also and not self.evaluate:
            yield "--evaluate-also asks --evaluate held-out rows of each task, and --evaluate is 0; give a number"

    @property
    def evaluates(self) -> bool:
        """Whether the policy is evaluated."""
        return bool(self.evaluate or self.evaluate_task)

    def sets(self, cfg: GraphConfig) -> tuple[EvaluationSet, ...]:
        """The sets of --evaluate-task."""
        like = cfg.get_part(TimedReward).held_out_task(cfg.data.task)
        return tuple(EvaluationSet.parse(text, like=like, samples=self.evaluate_samples) for text in self.evaluate_task)

    def trained_part(self, task: Task) -> RowPart:
        """The rows of the task that are trained on: all of a file, unless some are held out for the evaluation."""
        return "all" if self.evaluate_task or not (self.evaluate or task.generated) else "train"

    def prompt_limit(self, cfg: GraphConfig) -> PromptLimit:
        """How long a held-out prompt may be."""
        if isinstance(cfg.data, PromptData):
            return PromptLimit(self.evaluate_max_prompt_tokens or cfg.data.max_prompt_tokens, cfg.data.too_long)
        return PromptLimit(self.evaluate_max_prompt_tokens, engine=cfg.get_part(GeneratorOptions).engine.max_model_len)


def make_generator(cfg: GraphConfig, sampling: Sampling | None = None, **settings: Any) -> Generator:
    """A generator of the trained policy. It also answers held-out prompts, with `sampling` if each has several answers.

    `sampling` None: as the options say. `settings` are further arguments of `Generator`.
    """
    asked, generator = cfg.get_part(EvaluationOptions), cfg.get_part(GeneratorOptions)
    sampling = sampling or cfg.get_part(SamplingOptions).build(generator.stop_strings)
    several = asked.evaluate_samples > 1 or any(one.samples > 1 for one in asked.sets(cfg))
    settings = {"evaluation": sampling if several else None, **settings}
    return Generator(
        cfg.model,
        sampling=sampling,
        lora=cfg.get_part(TrainerOptions).lora,
        engine=generator.engine,
        probe_tolerance=asked.probe_tolerance,
        **settings,
    )


def add_evaluation(
    g: Graph,
    cfg: GraphConfig,
    generator: Generator,
    *,
    text: bool = False,
    answering: Serve[Prompt, Sample] | None = None,
) -> None:
    """Add the evaluation node, whose prompts `generator` answers, unless `cfg` asks for no evaluation.

    `answering`: the port of another node that answers them, with its help. `text`: the trained task has texts and no
    prompts. If the reward of held-out answers names a reward model, they are scored by the one that the graph has.
    """
    asked, reward = cfg.get_part(EvaluationOptions), cfg.get_part(TimedReward)
    if not asked.evaluates:
        return
    sets = asked.sets(cfg)
    held_out = Evaluation(
        () if sets else reward.held_out_task(cfg.data.task),
        cfg.model,
        num_prompts=max(1, asked.evaluate),
        num_samples=asked.evaluate_samples,
        every=asked.evaluate_every,
        also=asked.evaluate_also if asked.evaluate else (),
        sets=sets,
        training=None if text or isinstance(cfg.data, PreferenceData) else cfg.data.task,
        prompt_limit=asked.prompt_limit(cfg),
        concurrency=generator.engine.concurrency * g.placed[generator.name].replicas,
        **reward.held_out_asking,
    )
    evaluation = g.add("evaluation", held_out)
    g.call(evaluation.generate, answering or generator.requests)
    for scorer in (node for node in g.nodes.values() if isinstance(node, RewardModel) and held_out.asks_model):
        g.call(evaluation.score, scorer.requests)


def add_offline_evaluation(
    g: Graph, cfg: GraphConfig, *, trainer: Trainer, prompts: PromptSource, sampling: Sampling, text: bool = False
) -> None:
    """`add_evaluation` for a graph without a generator: adds one, with `sampling`, that gets the trainer's weights.

    The groups of `prompts` then need tickets, because the generator's version has to be known. If `cfg` asks for no
    evaluation, nothing is added and the trainer's weights are ignored.
    """
    if not cfg.get_part(EvaluationOptions).evaluates:
        g.ignore(trainer.weights)
        return
    generator = g.add("generator", make_generator(cfg, sampling), **cfg.place_generator())
    add_evaluation(g, cfg, generator, text=text)
    g.latest(trainer.weights, generator.weights)
    g.admit(prompts.prompts, until=generator.weights, staleness=1)
    g.ignore(generator.prompts)
    g.ignore(generator.rollouts)

"""The configuration of graphs that train the policy on its own samples, and the wiring that these graphs share.

    prompts → generator → (reference) → reward → advantage → batcher → trainer
                  ↑                                                       │ weights
                  └───────────────────────────────────────────────────────┘

`train_on_answers` is all of this picture; `train_on_groups` is the way from advantages back to the generator, for
graphs whose groups come from elsewhere, such as from episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

from flowrl.graph.graph import Graph, OnLimit, carried_type
from flowrl.graph.ports import In, Out
from flowrl.messages import Group, Prompt, Sample, Weights
from flowrl.messages.episode import Episode
from flowrl.models import Policy
from flowrl.models.model_size import Learning
from flowrl.nodes import (
    BestOfN,
    Generator,
    GroupAdvantage,
    PairMaker,
    PromptSource,
    Reward,
    RewardModel,
    TokenBatch,
    Trainer,
)
from flowrl.nodes.scoring.reference import EpisodeReference, Reference
from flowrl.options.graph_config import ConfigPart, GeneratorOptions, GraphConfig, SamplingOptions
from flowrl.options.loss_parts import GroupOptions, NormalisationOptions, PolicyLoss
from flowrl.options.reward_parts import ResponseShaping, RewardOptions, TimedReward
from flowrl.options.sizes import ReferenceSize, too_low
from flowrl.options.training_parts import EvaluationOptions, PromptData, TrainerOptions, add_evaluation
from flowrl.training.advantages import Estimate
from flowrl.training.loss.objective import Objective

S = TypeVar("S", bound=Sample)


@dataclass(frozen=True)
class StepOptions(ConfigPart):
    """How samples make steps: the size of a batch, and how old its weights may be."""

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

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, staleness=0, look_ahead=1, groups_per_step=1, optimizer_steps=1, epochs=1)

    @property
    def window(self) -> int:
        """`look_ahead`, or what is derived where it may be None."""
        return self.look_ahead

    @property
    def of_batcher(self) -> dict[str, Any]:
        """Further arguments of the batcher."""
        return {}


@dataclass(frozen=True)
class AnswerSteps(StepOptions):
    """How single answers make steps."""

    overlong_filter: bool = False
    """Keep responses that were cut off at `max_tokens` out of the loss. They still count in their group's baseline."""

    @property
    def of_batcher(self) -> dict[str, Any]:
        return {"mask_truncated": self.overlong_filter}


@dataclass(frozen=True)
class OnlineConfig(GraphConfig):
    """The configuration of a graph that trains the policy on its own answers to the prompts of a task."""

    learning: ClassVar[Learning | None] = "samples"

    data: PromptData = PromptData()
    generator: GeneratorOptions = GeneratorOptions()
    sampling: SamplingOptions = SamplingOptions()
    reward: TimedReward = TimedReward()
    steps: AnswerSteps = AnswerSteps()
    trainer: TrainerOptions = TrainerOptions()
    evaluation: EvaluationOptions = EvaluationOptions()

    @property
    def asks_functions(self) -> bool:
        return self.evaluation.evaluates


def make_prompts(cfg: GraphConfig, policy: Policy | None = None) -> PromptSource:
    """The source of groups of prompts, rendered for `policy` (default: the one that is trained)."""
    task, groups = cfg.data.task, cfg.find_part(GroupOptions)
    return cfg.get_part(PromptData).build(
        policy or cfg.model,
        group_size=cfg.get_part(SamplingOptions).group_size,
        part=cfg.get_part(EvaluationOptions).trained_part(task),
        curriculum=None if groups is None else groups.curriculum,
        answers_compared=cfg.get_part(TimedReward).compares_answers(task),
    )


def make_reward(
    cfg: OnlineConfig, *, function: Callable[..., Any] | None = None, normalise: bool = False
) -> Reward | RewardModel:
    """The node that scores responses: the task's reward, or the reward model.

    `function` is a reward that the graph has in place of the task's verifier; --task.reward replaces it.
    `normalise`: the model's scores are normalised by its own mean and standard deviation, unless
    --reward-model.normalise says otherwise.
    """
    reward, shape, task = cfg.get_part(RewardOptions), cfg.get_part(ResponseShaping), cfg.data.task
    shaping = shape.build(shape.overlong(cfg.sampling.max_tokens))
    if not reward.reward_model.model:
        return Reward(task, function=None if task.reward else function, shaping=shaping, **reward.asking)
    scoring = cfg.trainer.scoring(reward.reward_model)
    return reward.build_model(task, cfg.model, normalise=normalise, shaping=shaping, **scoring)


def make_batcher(cfg: GraphConfig, estimate: Estimate | None = None, **settings: Any) -> TokenBatch:
    """A batcher of groups. `estimate` says how their advantages are computed from rewards; None: they have none, or
    have them already. `settings` are further arguments of `TokenBatch`."""
    steps, trainer = cfg.get_part(StepOptions), cfg.get_part(TrainerOptions)
    if estimate is not None:
        normalised = cfg.get_part(NormalisationOptions).build(estimate)
        settings = {**normalised, "adaptive_kl": cfg.get_part(PolicyLoss).adaptive_kl, **settings}
    settings = {"layout": trainer.layout(cfg.model), **steps.of_batcher, **settings}
    return TokenBatch(
        steps.groups_per_step,
        token_budget=trainer.token_budget,
        optimizer_steps=steps.optimizer_steps,
        sources=cfg.data.task.source_names,
        **settings,
    )


def make_trainer(cfg: GraphConfig, objective: Objective, **settings: Any) -> Trainer:
    """A trainer of the policy for samples with this temperature; `settings` are further arguments of `Trainer`."""
    temperature, epochs = cfg.get_part(SamplingOptions).temperature, cfg.get_part(StepOptions).epochs
    return cfg.get_part(TrainerOptions).build(cfg.model, objective, temperature=temperature, epochs=epochs, **settings)


def add_reference(
    g: Graph,
    cfg: GraphConfig,
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
    kind = EpisodeReference if issubclass(carried_type(rollouts), Episode) else Reference
    temperature, scoring = cfg.get_part(SamplingOptions).temperature, cfg.get_part(TrainerOptions).scoring(size)
    scoring = {**scoring, "refresh_every": size.refresh_every, "mixup": size.mixup}
    initial = kind(cfg.model, temperature=temperature, **scoring)
    reference = g.add("reference", initial, **(cfg.place(size) if placed is None else placed))
    g.connect(cast(Out[Sample], rollouts), reference.rollouts)
    if size.refresh_every:
        g.latest(trainer.weights, reference.weights)
    followers = (reference.weights,) if size.refresh_every else ()
    return cast(Out[S], reference.referenced), followers


def train_on_answers(
    g: Graph,
    cfg: OnlineConfig,
    prompts: PromptSource,
    generator: Generator,
    reward: Reward | RewardModel,
    advantage: GroupAdvantage | BestOfN | PairMaker,
    batcher: TokenBatch,
    trainer: Trainer,
    *,
    reference: ReferenceSize | None,
    through: tuple[In[Sample], Out[Sample]] | None = None,
) -> Graph:
    """Wire these nodes as the picture at the top of this file, with the evaluation; returns the graph.

    `reference` is the size of the reference, None: there is none. `through` are the ports of a further node, through
    which answers go first.
    """
    g.connect(prompts.prompts, generator.prompts)
    answers = generator.rollouts
    if through is not None:
        g.connect(answers, through[0])
        answers = through[1]
    answers, followers = add_reference(g, cfg, reference, answers, trainer)
    g.connect(answers, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    train_on_groups(g, cfg, prompts.prompts, advantage.groups, batcher, trainer, generator, followers=followers)
    if prompts.curriculum is not None:
        g.call(advantage.outcomes, prompts.outcomes)
    add_evaluation(g, cfg, generator)
    cfg.share_devices(g, ("trainer", "reward", "reference"))
    return g


def train_on_groups(
    g: Graph,
    cfg: GraphConfig,
    prompts: Out[Prompt],
    groups: Out[Group],
    batcher: TokenBatch,
    trainer: Trainer,
    generator: Generator,
    *,
    followers: Sequence[In[Weights]] = (),
) -> None:
    """Wire the way of `groups` to the trainer and that of its weights back to the generator, within the staleness.

    `prompts` is the port that admits them.

    `followers` are the ports of other models that take new weights; they count in the staleness, too.
    """
    steps = cfg.get_part(StepOptions)
    g.connect(groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")  # each rank gets its part
    g.latest(trainer.weights, generator.weights)
    g.admit(
        prompts,
        until=(generator.weights, *followers),
        staleness=steps.staleness,
        on_limit=steps.on_limit,
        look_ahead=steps.window,
    )

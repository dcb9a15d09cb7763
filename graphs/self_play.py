"""GRPO on a game that the policy plays against itself: both seats are trained, each with its own reward.

A group is one start of the game, played `group_size` times; a seat is compared with the same seat of the other games.
With `--opponent-every N`, the policy plays one seat against an opponent that takes the policy's weights every N steps
and whose replies are not trained; with 0, the opponent stays at version 0. On GPUs, N is 0 or 1. Held-out games are
played against version 0, whose weights are never replaced: the score is the share of games that the policy wins.

    advantage   A_i = (R_i − mean R) / std R of a seat, over the games of one start
    loss        −Σ w·min(ρA, clip(ρ, 0.8, 1.2)A) / number of tokens, ρ = π/π_p, w = min(π_p/π_b, 2) of each token;
                π_p is the policy at the batch's start, π_b the one that sampled

    flowrl run self_play --steps 60
    flowrl run self_play --steps 60 --opponent-every 10
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl import Graph
from flowrl.nodes import EnvironmentSource, Evaluation, Generator, GroupAdvantage
from flowrl.options import (
    EnvironmentOptions,
    EpisodeConfig,
    EpisodeData,
    EvaluationOptions,
    ReplySampling,
    add_reference,
    make_batcher,
    make_generator,
    make_trainer,
    too_low,
)
from flowrl.tasks import Task


@dataclass(frozen=True)
class SelfPlay(EpisodeConfig):
    help_texts = {
        "task": "What `tiny` is warm-started on; other policies ignore it.",
        "evaluate": "Held-out games against version 0, before and after training; 0: none.",
    }

    data: EpisodeData = EpisodeData(Task("sticks"))
    sampling: ReplySampling = ReplySampling(max_tokens=4)
    episodes: EnvironmentOptions = EnvironmentOptions()
    evaluation: EvaluationOptions = EvaluationOptions(evaluate=256)

    environment: str = "flowrl.environments.sticks_env:Sticks"
    """The name of an environment with several seats, as in docs/environments.md."""
    opponent_every: int | None = None
    """None: the policy plays all seats. N: it plays one seat against its own weights, which the opponent takes every N
    steps; 0: against version 0."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, opponent_every=0)
        if self.evaluation.evaluate_task:
            yield "--evaluate-task names questions of a task, and games are evaluated with --evaluate; leave it out"
        if self.opponent_every is None and (self.groups.filters or self.normalisation.normalise_rewards):
            yield (
                "--dynamic-sampling, --mean-between and --normalise-rewards look at one reward of a game, and every "
                "seat has its own here; leave them out, or let the policy play one seat with --opponent-every"
            )
        if (self.opponent_every or 0) > 1 and self.uses_gpus:
            yield f"--opponent-every is {self.opponent_every}; on GPUs it has to be 0 or 1"

    def player(self, every: int = 1) -> Generator:
        """A generator that also samples in held-out games: a greedy player would repeat itself."""
        sampling = self.sampling.build(self.generator.stop_strings)
        return make_generator(self, sampling, evaluation=sampling, every=every, **self.episodes.parsers)


def graph(cfg: SelfPlay) -> Graph:
    objective = cfg.loss.build(cfg.episodes.limits.tokens)
    size, count, curriculum = cfg.sampling.group_size, cfg.data.num_prompts, cfg.groups.curriculum

    g = Graph("self_play")
    source = EnvironmentSource(cfg.environment, repeat=size, num_prompts=count, curriculum=curriculum)
    prompts = g.add("prompts", source)
    environment = g.add("environment", cfg.episodes.build(cfg, cfg.environment))
    generator = g.add("generator", cfg.player(), **cfg.place_generator())
    filtering = cfg.groups.build(cfg.steps.groups_per_step)
    advantage = g.add("advantage", GroupAdvantage(cfg.estimate, size=size, dynamic=filtering))
    batcher = g.add("batcher", make_batcher(cfg, cfg.estimate))
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))

    g.connect(prompts.prompts, environment.prompts)
    g.call(environment.generate, generator.turns, affinity_margin=cfg.episodes.affinity_margin)
    episodes, followers = add_reference(g, cfg, cfg.loss.compared_with(cfg), environment.episodes, trainer)
    g.connect(episodes, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)

    players, until = [generator], [generator.weights, *followers]
    if cfg.evaluation.evaluate or cfg.opponent_every == 0:
        first = g.add("first", cfg.player(), **cfg.place_generator() | {"replicas": 1})
        g.ignore(first.weights)  # it stays at version 0
        players.append(first)
        if cfg.opponent_every == 0:
            g.call(environment.opponent, first.turns)
        if cfg.evaluation.evaluate:
            evaluate_against(g, cfg, first, generator)
    if cfg.opponent_every:
        opponent = g.add("opponent", cfg.player(every=cfg.opponent_every), **cfg.place_generator() | {"replicas": 1})
        g.call(environment.opponent, opponent.turns)
        g.latest(trainer.weights, opponent.weights)
        players.append(opponent)
        until.append(opponent.weights)
    for player in players:
        g.ignore(player.prompts)
        g.ignore(player.rollouts)
    if prompts.curriculum is not None:
        g.call(advantage.outcomes, prompts.outcomes)
    g.admit(
        prompts.prompts,
        until=tuple(until),
        staleness=cfg.steps.staleness,
        on_limit=cfg.steps.on_limit,
        look_ahead=cfg.steps.window,
    )
    cfg.share_devices(g, ("trainer", "reference", *(() if cfg.uses_gpus else ("first", "opponent"))))
    return g


def evaluate_against(g: Graph, cfg: SelfPlay, first: Generator, generator: Generator) -> None:
    """Add held-out games, in which the policy of `generator` plays one seat and `first` the others."""
    arena = g.add("arena", cfg.episodes.build(cfg, cfg.environment))
    g.ignore(arena.prompts)
    g.ignore(arena.episodes)
    g.call(arena.generate, generator.turns, affinity_margin=cfg.episodes.affinity_margin)
    g.call(arena.opponent, first.turns)
    held_out = Evaluation(
        (),
        cfg.model,
        num_prompts=cfg.evaluation.evaluate,
        num_samples=cfg.evaluation.evaluate_samples,
        every=cfg.evaluation.evaluate_every,
        environments=(cfg.environment,),
        concurrency=generator.engine.concurrency * g.placed[generator.name].replicas,
    )
    g.call(g.add("evaluation", held_out).play, arena.requests)

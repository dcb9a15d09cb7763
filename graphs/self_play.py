"""GRPO on a game that the policy plays against itself: both seats are trained, each with its own reward.

A group is one start of the game, played `group_size` times; a seat is compared with the same seat of the other games.
With `--opponent-every N`, the policy plays one seat against an opponent that takes the policy's weights every N steps
and whose replies are not trained; with 0, the opponent stays at version 0. On GPUs, N is 0 or 1. Held-out games are
played against version 0, whose weights are never replaced: the score is the share of games that the policy wins.

    flowrl run self_play --steps 60
    flowrl run self_play --steps 60 --opponent-every 10
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl import Graph
from flowrl.blocks import refer
from flowrl.nodes import EnvironmentSource, Evaluation, Generator, GroupAdvantage
from flowrl.recipes.agent_tools import GroupedEpisodes
from flowrl.role_options import too_low
from flowrl.tasks import Task


@dataclass(frozen=True)
class SelfPlay(GroupedEpisodes):
    environment: str = "flowrl.environments.sticks_env:Sticks"
    """The name of an environment with several seats, as in docs/environments.md."""
    task: Task = Task("sticks")
    """What `tiny` is warm-started on; other policies ignore it."""
    opponent_every: int | None = None
    """None: the policy plays all seats. N: it plays one seat against its own weights, which the opponent takes every N
    steps; 0: against version 0."""
    max_tokens: int = 4
    evaluate: int = 256
    """Held-out games against version 0, before and after training; 0: none."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, opponent_every=0)
        if self.evaluate_task:
            yield "--evaluate-task names questions of a task, and games are evaluated with --evaluate; leave it out"
        if self.opponent_every is None and (self.filters or self.normalise_rewards):
            yield (
                "--dynamic-sampling, --mean-between and --normalise-rewards look at one reward of a game, and every "
                "seat has its own here; leave them out, or let the policy play one seat with --opponent-every"
            )
        if (self.opponent_every or 0) > 1 and self.uses_gpus:
            yield f"--opponent-every is {self.opponent_every}; on GPUs it has to be 0 or 1"

    def player(self, every: int = 1) -> Generator:
        """A generator that also samples in held-out games: a greedy player would repeat itself."""
        return Generator(
            self.model,
            sampling=self.sampling,
            evaluation=self.sampling,
            lora=self.lora,
            engine=self.engine,
            probe_tolerance=self.probe_tolerance,
            every=every,
            **self.parsers,
        )


def graph(cfg: SelfPlay) -> Graph:
    estimate = cfg.estimate(cfg.advantage, **cfg.reward_kl_settings)
    filtering = cfg.filtering(cfg.groups_per_step)

    g = Graph("self_play")
    source = EnvironmentSource(
        cfg.environment, repeat=cfg.group_size, num_prompts=cfg.num_prompts, curriculum=cfg.curriculum
    )
    prompts = g.add("prompts", source)
    environment = g.add("environment", cfg.episodes(cfg.environment))
    generator = g.add("generator", cfg.player(), **cfg.place_generator())
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size, dynamic=filtering))
    batcher = g.add("batcher", cfg.batcher(**cfg.of_advantages(estimate), adaptive_kl=cfg.adaptive_kl))
    trainer = g.add("trainer", cfg.make_trainer(cfg.loss(cfg.limits.tokens)), **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, environment.prompts)
    g.call(environment.generate, generator.turns, affinity_margin=cfg.affinity_margin)
    episodes, followers = refer(g, cfg, cfg.compared_with, environment.episodes, trainer)
    g.connect(episodes, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)

    players, until = [generator], [generator.weights, *followers]
    if cfg.evaluate or cfg.opponent_every == 0:
        first = g.add("first", cfg.player(), **cfg.place_generator() | {"replicas": 1})
        g.ignore(first.weights)  # it stays at version 0
        players.append(first)
        if cfg.opponent_every == 0:
            g.call(environment.opponent, first.turns)
        if cfg.evaluate:
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
    cfg.share_devices(g, ("trainer", "reference", *(() if cfg.uses_gpus else ("first", "opponent"))))
    if cfg.curriculum.used:
        g.call(advantage.outcomes, prompts.outcomes)
    g.admit(
        prompts.prompts,
        until=tuple(until),
        staleness=cfg.staleness,
        on_limit=cfg.on_limit,
        look_ahead=cfg.window,
    )
    return g


def evaluate_against(g: Graph, cfg: SelfPlay, first: Generator, generator: Generator) -> None:
    """Add held-out games, in which the policy of `generator` plays one seat and `first` the others."""
    arena = g.add("arena", cfg.episodes(cfg.environment))
    g.ignore(arena.prompts)
    g.ignore(arena.episodes)
    g.call(arena.generate, generator.turns, affinity_margin=cfg.affinity_margin)
    g.call(arena.opponent, first.turns)
    held_out = Evaluation(
        (),
        cfg.model,
        num_prompts=cfg.evaluate,
        num_samples=cfg.evaluate_samples,
        every=cfg.evaluate_every,
        environments=(cfg.environment,),
        concurrency=generator.engine.concurrency * g.placed[generator.name].replicas,
    )
    g.call(g.add("evaluation", held_out).play, arena.requests)

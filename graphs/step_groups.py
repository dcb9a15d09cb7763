"""GRPO on episodes, in which replies to equal observations of a group are compared as well (GiGPO, arXiv 2505.10978).

Episodes of one start come to equal states. What the policy was told since its last reply names the state; the replies
to it form a step group, and each reply is judged by what its episode still gets from it on.

    advantage   A_t = (R_i − mean R) / std R + ω (G_t − mean G) / std G; R over the episodes of one start, and
                G_t = Σ_{u≥t} γ^{u−t} r_u over the replies of all these episodes to the same state; 0 for a reply alone
    loss        −Σ w·min(ρA, clip(ρ, 0.8, 1.2)A) / number of tokens, as in agent_tools

    flowrl run step_groups --steps 60
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import cast

import numpy as np

from flowrl import Episode, Graph, Scored, Trainable
from flowrl.options import EnvironmentOptions, EpisodeConfig, EpisodeData, ReplySampling, too_low
from flowrl.recipes.agent_tools import episode_graph
from flowrl.tasks import Task
from flowrl.training.advantages import Estimate, Scale, require_one_seat

ComparedReply = tuple[bytes, slice, float]
"""What the policy was told, where its reply is among the tokens of all sequences, and what the episode gets from it."""


@dataclass(frozen=True)
class StepEstimate(Estimate):
    """Adds to each reply's advantage how it compares with the group's other replies to the same observation."""

    step_weight: float = 1.0
    step_gamma: float = 0.95

    def make_trainables(
        self, samples: Sequence[Scored], *, kl_coef: float | None = None, scale: Scale | None = None
    ) -> tuple[Trainable, ...]:
        require_one_seat(samples, "a step group")
        steps = [steps_of(cast(Episode, episode), self.step_gamma) for episode in samples]
        returns: defaultdict[bytes, list[float]] = defaultdict(list)
        for state, _, gained in (step for one in steps for step in one):
            returns[state].append(gained)
        made = []
        by_episode = super().make_trainables(samples, kl_coef=kl_coef, scale=scale)
        for sample, of_episode in zip(by_episode, steps, strict=True):
            advantages = sample.advantages.copy()
            for state, place, gained in of_episode:
                advantages[place] += self.step_weight * compared(gained, returns[state])
            made.append(replace(sample, advantages=advantages))
        return tuple(made)


def compared(gained: float, others: Sequence[float]) -> float:
    """(G − mean) / std; 0 if all are equal."""
    spread = float(np.std(others, ddof=1)) if len(others) > 1 else 0.0
    return (gained - float(np.mean(others))) / spread if spread > 1e-9 else 0.0


def steps_of(episode: Episode, gamma: float) -> list[ComparedReply]:
    """The replies of an episode, in order."""
    token_ids, mask = episode.column("token_ids"), episode.whole_mask
    assert token_ids is not None
    found: list[ComparedReply] = []
    starts = list(sequence_starts(episode))
    for place, reward in episode.rewards_by_turn:
        own = np.flatnonzero(~mask[: place + 1])
        start = int(own[-1]) + 1 if own.size else 0  # the reply is the run of policy tokens that ends at `place`
        told_from = max(found[-1][1].stop if found else 0, max(at for at in starts if at <= start))
        found.append((token_ids[told_from:start].tobytes(), slice(start, place + 1), reward))
    gained = 0.0
    for number in reversed(range(len(found))):
        state, reply, reward = found[number]
        gained = reward + gamma * gained
        found[number] = state, reply, gained
    return found


def sequence_starts(episode: Episode) -> Iterator[int]:
    start = 0
    for sequence in episode.sequences:
        yield start
        start += sequence.token_ids.size


@dataclass(frozen=True)
class StepGroups(EpisodeConfig):
    help_texts = {"task": "What `tiny` is warm-started on; other policies ignore it."}

    data: EpisodeData = EpisodeData(Task("sticks"))
    sampling: ReplySampling = ReplySampling(max_tokens=16)
    episodes: EnvironmentOptions = EnvironmentOptions()

    environment: str = "flowrl.environments.sticks_env:SticksAgainst"
    """The environment's name, as in docs/environments.md."""
    step_weight: float = 1.0
    """ω: weight of the comparison of replies; 0: episodes alone are compared."""
    step_gamma: float = 0.95
    """Discount of later turns in what a reply is worth."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, step_weight=0, step_gamma=0)
        if self.episodes.credit == "turn":
            yield "--credit turn compares turns of equal number, and here replies to equal observations; leave it out"
        if self.step_gamma > 1:
            yield f"--step-gamma is {self.step_gamma}; it has to be between 0 and 1"


def graph(cfg: StepGroups) -> Graph:
    usual = {one.name: getattr(cfg.estimate, one.name) for one in fields(cfg.estimate)}
    estimate = StepEstimate(**usual, step_weight=cfg.step_weight, step_gamma=cfg.step_gamma)
    return episode_graph("step_groups", cfg, cfg.environment, estimate)

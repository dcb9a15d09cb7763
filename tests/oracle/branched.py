"""Episodes of several sequences: the cases, the recorded groups, and the plain loop that says what they ought to do.

The loop goes episode by episode and sequence by sequence, each in a forward pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.messages.episode import Episode
from flowrl.training.settings import Layout
from tests.nodes.episodes.branching_episodes import episode
from tests.nodes.episodes.test_turn_credit import plain as turn_advantages
from tests.oracle import plain
from tests.oracle.cases import LENGTH, LR, RATIOS
from tests.training.training_cases import VOCABULARY

GAMMA = 0.9
BATCHES = 2
VERSIONS = range(2, 2 + BATCHES)
"""Those that the batches update; the oldest tokens are of version 0."""
WIDE = (0.05, 20.0)
"""Range of the corrections that zero what is outside of it: the recorded behavior logprobs are no model's."""
SHAPES = (
    ([[2, 3], [4], [1, 5]], [[3]], [[2, 2, 2]]),
    ([[1], [2], [3], [4], [2], [1], [2], [6]], [[4, 1], [3]]),
    ([[5], [5]], [[2]], [[3], [1, 1]], [[2, 4]]),
)
"""Of each group, each member: the replies of each sequence. One episode has a context rewritten at every turn."""


@dataclass(frozen=True)
class BranchedCase:
    """One way from recorded episodes to weights."""

    name: str
    credit: str
    ratio: str
    aggregation: str
    mask_staleness: int = -1
    optimizer_steps: int = 1
    layout: Layout = "rows"

    @property
    def objective(self) -> dict[str, Any]:
        """Fields of PolicyObjective."""
        constant = {"length": LENGTH} if self.aggregation == "constant" else {}
        wide = {"correction_range": WIDE} if self.ratio in ("cispo", "gspo") else {}
        return {**RATIOS[self.ratio], **wide, "aggregation": self.aggregation, **constant}


IN_ROWS = (
    BranchedCase("token", "episode", "ppo", "token"),
    BranchedCase("sequence", "episode", "dual_clip", "sequence", optimizer_steps=2),
    BranchedCase("sequence_stale", "episode", "ppo", "sequence", mask_staleness=1),
    BranchedCase("constant", "episode", "cispo", "constant", mask_staleness=1, optimizer_steps=2),
    BranchedCase("turn_token", "turn", "decoupled", "token", mask_staleness=1),
    BranchedCase("turn_sequence", "turn", "ppo", "sequence", mask_staleness=1, optimizer_steps=2),
    BranchedCase("turn_constant", "turn", "behavior", "constant"),
    BranchedCase("turn_gspo", "turn", "gspo", "sequence"),
    BranchedCase("turn_reinforce", "turn", "reinforce", "sequence", optimizer_steps=2),
)
BRANCHED_CASES = (*IN_ROWS, *(replace(case, name=f"{case.name}-tree", layout="tree") for case in IN_ROWS[::2]))
"""Some once more, with the history that sequences of an episode share computed once."""


def recorded(version: int) -> list[list[Episode]]:
    """The groups of the batch that updates `version`, the same in every process."""
    draw = np.random.default_rng(50 + version)
    return [
        [
            episode(
                member,
                shape,
                np.round(draw.normal(0.3, 0.5, sum(map(len, shape))), 2).tolist(),
                group=f"{version}-{group}",
                version=version,
                vocabulary=VOCABULARY,
                draw=draw,
            )
            for member, shape in enumerate(shapes)
        ]
        for group, shapes in enumerate(SHAPES)
    ]


@dataclass
class BranchedOutcome:
    """What the loop did."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of every batch, mean over its optimizer steps."""
    weights: dict[str, Tensor] = field(default_factory=dict)


def advantages(group: Sequence[Episode], case: BranchedCase) -> dict[str, list[list[float]]]:
    """By sample id: of each sequence, the advantage of each of its policy tokens."""
    if case.credit == "turn":
        of_turns = turn_advantages([[r for _, r in e.rewards_by_turn] for e in group], "group_norm", GAMMA)
    else:
        of_turns = [[a] * e.turns for e, a in zip(group, plain.outcome_rewards(group, "group_norm"), strict=True)]
    found = {}
    for one, values in zip(group, of_turns, strict=True):
        lists, before = [], 0
        for sequence in one.sequences:
            lists.append([values[turn_at(one, before + place)] for place in plain.places(sequence)])  # type: ignore[arg-type]
            before += len(sequence.token_ids)
        found[one.sample_id] = lists
    return found


def turn_at(one: Episode, place: int) -> int:
    """The turn of a token, counted through all sequences."""
    return next(turn for turn, (last, _) in enumerate(one.rewards_by_turn) if place <= last)


def step_loss(model: Any, episodes: Sequence[Episode], old: Any, found: Any, case: Any, version: int) -> Tensor:
    """The loss of one optimizer step."""
    weights = {
        e.sample_id: [torch.tensor(plain.trained(s, case, version), dtype=torch.float32) for s in e.sequences]  # type: ignore[arg-type]
        for e in episodes
    }
    sizes = {name: sum(float(w.sum()) for w in ws) for name, ws in weights.items()}
    num_tokens, num_episodes = sum(sizes.values()), sum(size > 0 for size in sizes.values())
    loss = torch.zeros(())
    for one in episodes:
        for number, sequence in enumerate(one.sequences):
            w, a = weights[one.sample_id][number], torch.tensor(found[one.sample_id][number])
            lp, behavior = logprobs(model, sequence), torch.tensor(sequence.behavior_logprobs[sequence.policy_mask])
            proximal = old[one.sample_id][number]
            base = behavior if case.objective.get("old") == "behavior" else proximal
            terms, _ = plain.policy_terms(lp, base, a, w, case)
            total = (terms * plain.correction(proximal - behavior, w, case) * w).sum()
            if case.aggregation == "token":
                loss = loss + total / num_tokens
            elif case.aggregation == "sequence":
                loss = loss + total / max(1.0, sizes[one.sample_id]) / num_episodes
            else:
                loss = loss + total / (num_episodes * LENGTH)
    return loss


def logprobs(model: Any, sequence: Any) -> Tensor:
    (log_p,) = plain.log_softmax_of(model, [sequence])
    return plain.of_targets(log_p, sequence)


def run(case: BranchedCase, model_dir: Path) -> BranchedOutcome:
    """Train a fresh copy of the model on all batches."""
    model = plain.load_policy(model_dir)
    optimizer, outcome = torch.optim.SGD(model.parameters(), lr=LR), BranchedOutcome()
    for version in VERSIONS:
        groups = recorded(version)
        found = {name: lists for group in groups for name, lists in advantages(group, case).items()}
        episodes = [one for group in groups for one in group]
        with torch.no_grad():
            old = {one.sample_id: [logprobs(model, s) for s in one.sequences] for one in episodes}
        losses = []
        for indices in np.array_split(np.arange(len(episodes)), case.optimizer_steps):
            optimizer.zero_grad()
            loss = step_loss(model, [episodes[i] for i in indices], old, found, case, version)
            loss.backward()  # type: ignore[no-untyped-call]
            outcome.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
            optimizer.step()
            losses.append(float(loss.detach()))
        outcome.losses.append(sum(losses) / len(losses))
    outcome.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome

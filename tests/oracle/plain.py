"""The plain full-batch loop: what three batches of recorded rollouts ought to do to a model.

It shares no code with flowrl: advantages sample by sample in Python floats, full logits, every formula
written out once more, no micro-batches, no ranks, torch's own SGD.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.messages import Scored
from tests.oracle.cases import (
    BATCHES,
    FIRST,
    GROUPS,
    LAM,
    LATER_RATIOS,
    LR,
    PART_WEIGHTS,
    PASSES,
    TEMPERATURE,
    OracleCase,
)
from tests.oracle.rollouts import Recorded


@dataclass
class Outcome:
    """What the loop did."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of every optimizer step."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    clip_fractions: list[float] = field(default_factory=list)
    """Of every batch, mean over its optimizer steps."""


# Advantages


def places(sample: Scored) -> list[int]:
    return [t for t in range(len(sample.token_ids)) if sample.policy_mask[t]]


def outcome_rewards(group: Sequence[Scored], estimator: str) -> list[float]:
    """R' of each member."""
    rewards = [s.reward for s in group]
    if estimator in ("reinforce", "gae"):
        return rewards
    if estimator == "gdpo":
        return normalised_parts(group)
    rewards = [s.reward + sum(r for _, r in s.turn_rewards) for s in group]
    if estimator == "pass_at_k":
        return of_best([r >= PASSES["pass_at"] for r in rewards], PASSES["pass_k"])
    n, mean = len(rewards), sum(rewards) / len(rewards)
    if max(rewards) - min(rewards) <= 1e-6 * max(1.0, *map(abs, rewards)):
        return [0.0] * n
    if estimator == "rloo":
        return [r - sum(rewards[:i] + rewards[i + 1 :]) / (n - 1) for i, r in enumerate(rewards)]
    if estimator == "group_norm":
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - 1))
        return [(r - mean) / (deviation + 1e-9) for r in rewards]
    return [r - mean for r in rewards]


def of_best(passes: Sequence[bool], k: int) -> list[float]:
    """Every choice of k members has the reward 1 if one passes; a member has the mean of the choices that have it."""
    rewards = {one: float(any(passes[n] for n in one)) for one in combinations(range(len(passes)), k)}
    mean = sum(rewards.values()) / len(rewards)
    own = [[reward for one, reward in rewards.items() if n in one] for n in range(len(passes))]
    return [(sum(mine) / len(mine) - mean) / (math.sqrt(mean * (1 - mean)) + 1e-6) for mine in own]


def normalised_parts(group: Sequence[Scored]) -> list[float]:
    found = [0.0] * len(group)
    for name, weight in PART_WEIGHTS:
        parts = [s.reward_parts[name] for s in group]
        mean = sum(parts) / len(parts)
        deviation = math.sqrt(sum((one - mean) ** 2 for one in parts) / (len(parts) - 1))
        if max(parts) - min(parts) > 1e-6:
            found = [x + weight * (one - mean) / (deviation + 1e-9) for x, one in zip(found, parts, strict=True)]
    return found


def token_advantages(sample: Scored, outcome: float, case: OracleCase) -> list[float]:
    """A at each policy token, before whitening."""
    steps, (coefficient, estimator) = places(sample), case.kl_in_reward
    rewards = []
    for t in steps:
        d = float(sample.behavior_logprobs[t]) - float(sample.ref_logprobs[t])
        divergence = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
        turn = sum(r for place, r in sample.turn_rewards if place == t)
        turn = turn if case.estimator in ("reinforce", "gae") else 0.0
        rewards.append(turn - coefficient * min(max(divergence, -10.0), 10.0))
    rewards[-1] += outcome
    if case.estimator == "gae":
        values = [float(sample.values[t]) for t in steps] + [0.0]
        rewards = [r + case.gamma * values[i + 1] - values[i] for i, r in enumerate(rewards)]
    decay = case.gamma * (LAM if case.estimator == "gae" else 1.0)
    return [sum(decay ** (k - i) * rewards[k] for k in range(i, len(rewards))) for i in range(len(rewards))]


def trained(sample: Scored, case: OracleCase, version: int) -> list[bool]:
    limit = 99 if case.mask_staleness < 0 else case.mask_staleness
    return [version - int(sample.versions[t]) <= limit for t in places(sample)]


def batch_advantages(groups: Sequence[Sequence[Scored]], case: OracleCase, version: int) -> dict[str, list[float]]:
    """By sample id, whitened over all trained tokens where the case says so."""
    found = {
        s.sample_id: token_advantages(s, outcome, case)
        for group in groups
        for s, outcome in zip(group, outcome_rewards(group, case.estimator), strict=True)
    }
    if case.whiten == "off":
        return found
    chosen = [
        a
        for group in groups
        for s in group
        for a, kept in zip(found[s.sample_id], trained(s, case, version), strict=True)
        if kept
    ]
    mean = sum(chosen) / len(chosen)
    deviation = math.sqrt(max(1e-8, sum((a - mean) ** 2 for a in chosen) / len(chosen)))
    scale = 1.0 if case.whiten == "mean" else deviation
    return {name: [(a - mean) / scale for a in values] for name, values in found.items()}


# Losses


def log_softmax_of(model: torch.nn.Module, samples: Sequence[Scored]) -> list[Tensor]:
    """log p over the vocabulary at each policy token, one forward for all samples."""
    longest = max(len(s.token_ids) for s in samples)
    ids, seen = torch.zeros(len(samples), longest, dtype=torch.long), torch.zeros(len(samples), longest)
    for row, s in enumerate(samples):
        ids[row, : len(s.token_ids)] = torch.tensor(s.token_ids.astype(np.int64))
        seen[row, : len(s.token_ids)] = 1
    log_p = torch.log_softmax(model(input_ids=ids, attention_mask=seen).logits / TEMPERATURE, dim=-1)
    return [log_p[row, torch.tensor(places(s)) - 1] for row, s in enumerate(samples)]


def of_targets(log_p: Tensor, sample: Scored) -> Tensor:
    targets = torch.tensor(sample.token_ids.astype(np.int64))[places(sample)]
    return log_p.gather(-1, targets[:, None])[:, 0]


def correction(u_log: Tensor, weight: Tensor, case: OracleCase) -> Tensor:
    """The weight of each token for the gap between proximal and behavior policy."""
    options = case.objective
    kind, (low, high) = options["correction"], options.get("correction_range", (0.0, 2.0))
    u = u_log.exp()
    if kind is None:
        return torch.ones_like(u)
    if kind == "decoupled":
        return u * (u <= high)
    if kind == "icepop":
        return u * ((u >= low) & (u <= high))
    if kind == "sequence_mask":
        mean = math.exp(float((u_log * weight).sum()) / max(1.0, float(weight.sum())))
        return u.clamp(low, high) * float(low <= mean <= high)
    if options.get("correction_level") == "sequence":
        product = math.exp(float((u_log * weight).sum()))
        return torch.full_like(u, min(max(product, low), high))
    return u.clamp(low, high)


def chosen_tokens(
    samples: Sequence[Scored], weights: Sequence[Tensor], found: dict[str, list[float]], options: dict[str, Any]
) -> list[Tensor]:
    """Of each sample, the tokens that clip_cov or kl_cov chooses among all trained tokens of a step."""
    listed = []
    for number, (s, w) in enumerate(zip(samples, weights, strict=True)):
        keys = np.random.default_rng(zlib.crc32(f"{s.sample_id}/0".encode())).random(len(s.token_ids))
        listed += [
            (number, i, found[s.sample_id][i], float(s.behavior_logprobs[t]), float(keys[t]))
            for i, t in enumerate(places(s))
            if w[i]
        ]
    mean_a, mean_lp = (sum(one[column] for one in listed) / len(listed) for column in (2, 3))
    covariances = {(n, i): (np.float32(a) - mean_a) * (lp - mean_lp) for n, i, a, lp, _ in listed}
    if options.get("kind") == "kl_cov":
        order = sorted(covariances, key=lambda place: -covariances[place])
    else:
        low, high = options["cov_range"]
        order = [(n, i) for n, i, *_ in sorted(listed, key=lambda one: one[4]) if low < covariances[n, i] < high]
    chosen = [torch.zeros(len(w)) for w in weights]
    for n, i in order[: max(1, int(options["cov_share"] * len(listed)))]:
        chosen[n][i] = 1.0
    return chosen


def later_terms(
    lp: Tensor, base: Tensor, a: Tensor, weight: Tensor, chosen: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The kinds of `LATER_RATIOS`."""
    kind, low, high = options["kind"], options.get("clip_low"), options.get("clip_high")
    ratio, never, num = (lp - base).exp(), torch.zeros_like(a), max(1.0, float(weight.sum()))
    if kind == "sapo":
        good, other = options["sapo_temperatures"]
        tau = torch.tensor([good if one > 0 else other for one in a.tolist()])
        return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * a, never
    if kind == "vespo":
        w = math.exp(float(((lp - base).detach() * weight).sum()))
        pairs = zip(*(options[name] for name in ("vespo_powers", "vespo_decays")), strict=True)
        good, other = (w**power * math.exp(decay - decay * w) for power, decay in pairs)
        return -torch.tensor([good if one >= 0 else other for one in a.tolist()]) * a * lp, never
    if kind == "gmpo":
        limited = torch.where(a > 0, (lp - base).clamp(max=high), (lp - base).clamp(min=-low))
        mean = math.exp(float((limited.detach() * weight).sum()) / num)
        return -a * mean * limited.exp() / limited.exp().detach(), ((limited != lp - base) & (a != 0)).float()
    if kind == "dppo":
        moved = (lp.exp() - base.exp()).detach()
        outside = torch.where(a > 0, moved > high, moved < -low).float()
        return -(1 - outside) * a * ratio + options["ratio_penalty"] * (lp - base) ** 2, outside
    if kind == "kl_cov":
        return -a * ratio + chosen * options["ratio_penalty"] * (lp - base).abs(), chosen
    whole, limited = ratio * a, ratio.clamp(1 - low, 1 + high) * a
    return -torch.min(whole, limited) * (1 - chosen), torch.max((limited < whole).float(), chosen)


def policy_terms(lp: Tensor, base: Tensor, a: Tensor, weight: Tensor, case: OracleCase) -> tuple[Tensor, Tensor]:
    """(loss, whether it is clipped) at each token."""
    options = case.objective
    kind, low, high = options.get("kind", "ppo"), options.get("clip_low", 0.2), options.get("clip_high", 0.2)
    if kind == "reinforce":
        return -a * lp, torch.zeros_like(a)
    if kind == "cispo":
        ratio = (lp - base).exp().detach()
        limited = ratio.clamp(low, high)
        return -limited * a * lp, (limited * a < ratio * a).float()
    ratio = (lp - base).exp()
    if kind == "gspo":
        mean = ((lp - base).detach() * weight).sum() / max(1.0, float(weight.sum()))
        ratio = mean.exp() * lp.exp() / lp.exp().detach()
    whole, limited = ratio * a, ratio.clamp(1 - low, 1 + high) * a
    loss = -torch.min(whole, limited)
    if "dual_clip" in options:
        loss = torch.where(a < 0, -torch.max(torch.min(whole, limited), options["dual_clip"] * a), loss)
    return loss, (limited < whole).float()


def divergence(lp: Tensor, ref: Tensor, behavior: Tensor, estimator: str) -> Tensor:
    d = lp - ref
    if estimator == "k2":
        return (d * d / 2).clamp(-10, 10)
    k3 = (torch.exp(-d) - 1 + d).clamp(-10, 10)
    return k3 * (lp - behavior).exp() if estimator == "k3_unbiased" else k3


def step_loss(
    model: torch.nn.Module,
    samples: Sequence[Scored],
    old: dict[str, Tensor],
    found: dict[str, list[float]],
    case: OracleCase,
    version: int,
) -> tuple[Tensor, float]:
    """(loss, clip fraction) of one whole optimizer step."""
    options = case.objective
    weights = [torch.tensor(trained(s, case, version), dtype=torch.float32) for s in samples]
    num_tokens = sum(float(w.sum()) for w in weights)
    num_sequences = sum(bool(w.any()) for w in weights)
    loss, num_clipped = torch.zeros(()), 0.0
    chosen = chosen_tokens(samples, weights, found, options) if "cov_share" in options else weights
    for s, w, c, log_p in zip(samples, weights, chosen, log_softmax_of(model, samples), strict=True):
        lp, where = of_targets(log_p, s), places(s)
        behavior, ref = torch.tensor(s.behavior_logprobs[where]), torch.tensor(s.ref_logprobs[where])
        proximal = old[s.sample_id]
        base = behavior if options.get("old") == "behavior" else proximal
        a = torch.tensor(found[s.sample_id])
        if case.ratio in LATER_RATIOS:
            terms, clipped = later_terms(lp, base, a, w, c, options)
        else:
            terms, clipped = policy_terms(lp, base, a, w, case)
        terms = terms * correction(proximal - behavior, w, case)
        if "kl_coef" in options:
            terms = terms + options["kl_coef"] * divergence(lp, ref, behavior, options["kl_estimator"])
        terms = terms + options.get("entropy_coef", 0.0) * (log_p.exp() * log_p).sum(-1)
        total, num_clipped = (terms * w).sum(), num_clipped + float((clipped * w).sum())
        if case.aggregation == "token":
            loss = loss + total / num_tokens
        elif case.aggregation == "sequence":
            loss = loss + total / max(1.0, float(w.sum())) / num_sequences
        else:
            loss = loss + total / (num_sequences * options["length"])
    return loss, num_clipped / num_tokens


def load_policy(model_dir: Path) -> Any:
    """The model as transformers has it, but for the pad token's embedding: as any other's, it learns."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None
    return model


def run(case: OracleCase, recorded: Recorded, model_dir: Path) -> Outcome:
    """Train a fresh copy of the model on all batches."""
    model = load_policy(model_dir)
    optimizer, outcome = torch.optim.SGD(model.parameters(), lr=LR), Outcome()
    for number in range(BATCHES):
        groups, version = recorded[number * GROUPS : (number + 1) * GROUPS], FIRST + number
        found = batch_advantages(groups, case, version)
        samples = [s for group in groups for s in group]
        with torch.no_grad():
            pairs = zip(samples, log_softmax_of(model, samples), strict=True)
            old = {s.sample_id: of_targets(log_p, s) for s, log_p in pairs}
        clipped = []
        for _ in range(case.epochs):
            for indices in np.array_split(np.arange(len(samples)), case.optimizer_steps):
                optimizer.zero_grad()
                loss, fraction = step_loss(model, [samples[i] for i in indices], old, found, case, version)
                loss.backward()
                outcome.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
                optimizer.step()
                clipped.append(fraction)
        outcome.clip_fractions.append(sum(clipped) / len(clipped))
    outcome.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome

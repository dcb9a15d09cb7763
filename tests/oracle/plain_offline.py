"""The plain full-batch loop for preferences, single verdicts and values. It shares no code with flowrl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.messages import Trainable
from tests.oracle.cases import BATCHES, FIRST, LR, TEMPERATURE
from tests.oracle.offline import OfflineCase, make_batch
from tests.oracle.plain import Outcome, load_policy, places

Weights = dict[str, Tensor]


def run(case: OfflineCase, model_dir: Path, scalar_start: Path) -> Outcome:
    """Train a fresh copy of the model on all batches."""
    model = _model(case, model_dir, scalar_start)
    optimizer, outcome = torch.optim.SGD(model.parameters(), lr=LR), Outcome()
    for number in range(BATCHES):
        samples = make_batch(case, number).samples
        units = [samples[n : n + 2] for n in range(0, len(samples), 2)]
        if case.family != "dpo":
            units = [(sample,) for sample in samples]
        for _ in range(case.epochs):
            for indices in np.array_split(np.arange(len(units)), case.optimizer_steps):
                optimizer.zero_grad()
                LOSSES[case.family](model, [units[i] for i in indices], case, FIRST + number).backward()
                named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
                outcome.gradients.append(named)
                optimizer.step()
    outcome.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome


def _model(case: OfflineCase, model_dir: Path, scalar_start: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    if case.head == "lm":
        return load_policy(model_dir)
    model: Any = AutoModelForSequenceClassification.from_pretrained(model_dir, dtype=torch.float32, num_labels=1)
    model.load_state_dict(torch.load(scalar_start))
    model.get_input_embeddings().padding_idx = None
    return model


def completion(model: Any, token_ids: np.ndarray, mask: np.ndarray) -> tuple[Tensor, int]:
    """(log p of the completion, its number of tokens)."""
    ids = torch.tensor(token_ids.astype(np.int64))
    log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0] / TEMPERATURE, -1)
    steps = [t for t in range(len(ids)) if mask[t]]
    return torch.stack([log_p[t - 1, ids[t]] for t in steps]).sum(), len(steps)


def log_ratio(model: Any, sample: Trainable) -> tuple[Tensor, Tensor, int]:
    """(log π/ref, log π, number of tokens) of a sample's completion."""
    logprob, length = completion(model, sample.token_ids, sample.policy_mask)
    reference = sum(float(sample.ref_logprobs[t]) for t in places(sample))
    return logprob - reference, logprob, length


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-x))


def dpo(model: Any, units: Sequence[Sequence[Trainable]], case: OfflineCase, version: int) -> Tensor:
    options = case.objective
    beta, kind = options["beta"], options.get("kind", "dpo")
    loss = torch.zeros(())
    for pair in units:
        chosen, rejected = sorted(pair, key=lambda s: -s.label)
        (up, logprob, length), (down, _, other_length) = log_ratio(model, chosen), log_ratio(model, rejected)
        if kind == "ipo":
            loss = loss + (up / length - down / other_length - 1 / (2 * beta)) ** 2
        else:
            epsilon, h = options.get("label_smoothing", 0.0), up - down
            loss = loss - (1 - epsilon) * log_sigmoid(beta * h) - epsilon * log_sigmoid(-beta * h)
        loss = loss - options.get("nll_coef", 0.0) * logprob / length
    return loss / len(units)


def kto(model: Any, units: Sequence[Sequence[Trainable]], case: OfflineCase, version: int) -> Tensor:
    options = case.objective
    samples = [unit[0] for unit in units]
    gaps = []
    for sample in samples:
        crossed = sample.mismatched
        with torch.no_grad():
            logprob, _ = completion(model, crossed.token_ids, crossed.mask)
        gaps.append(float(logprob) - sum(float(x) for x in crossed.ref_logprobs))
    z0 = max(0.0, sum(gaps) / len(gaps))
    loss = torch.zeros(())
    for sample in samples:
        r = log_ratio(model, sample)[0]
        if sample.label > 0:
            loss = loss + options.get("desirable_weight", 1.0) * (1 - 1 / (1 + torch.exp(-options["beta"] * (r - z0))))
        else:
            weight = options.get("undesirable_weight", 1.0)
            loss = loss + weight * (1 - 1 / (1 + torch.exp(-options["beta"] * (z0 - r))))
    return loss / len(samples)


def value(model: Any, units: Sequence[Sequence[Trainable]], case: OfflineCase, version: int) -> Tensor:
    limit, clip = 99 if case.mask_staleness < 0 else case.mask_staleness, case.objective["clip"]
    errors = []
    for (sample,) in units:
        ids = torch.tensor(sample.token_ids.astype(np.int64))[None]
        hidden = model.base_model(input_ids=ids)[0][0]
        for t in places(sample):
            if version - int(sample.versions[t]) > limit:
                continue
            v, old, r = model.score(hidden[t - 1])[0], float(sample.values[t]), float(sample.returns[t])
            error = (v - r) ** 2
            if clip is not None:
                error = torch.max(error, (old + (v - old).clamp(-clip, clip) - r) ** 2)
            errors.append(0.5 * error)
    return torch.stack(errors).mean()


LOSSES = {"dpo": dpo, "kto": kto, "value": value}

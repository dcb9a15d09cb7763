"""Two real ZeRO ranks against a plain full-batch loop: gradients, weights, export and checkpoints.

The plain loop below shares no code with flowrl's training: full logits, the formulas written out once
more, no micro-batches, torch's own SGD. It takes the same samples one by one, in the batch's order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowrl.messages import Batch, Trainable
from flowrl.messages.forest import num_unique
from flowrl.runtime.driver.resources import LOOPBACK
from tests.house.further_cases import chosen
from tests.rigs.run_process import is_loopback
from tests.stack.ranks.ranks import run_ranks
from tests.stack.ranks.training_rank import RESUMED
from tests.training.training_cases import (
    BATCHES,
    CASES,
    DECAY,
    FIRST,
    LR,
    TEMPERATURE,
    Case,
    make_balanced,
    make_batch,
    make_mixture,
    make_model,
    make_normed,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def gang_dir(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where two ranks left what every chosen case gave."""
    directory = tmp_path_factory.mktemp("gang")
    make_model(directory / "tied", tied=True)
    make_model(directory / "untied", tied=False)
    make_mixture(directory / "experts")
    make_balanced(directory / "balanced")
    make_normed(directory / "normed")
    names = chosen(request, [case.name for case in CASES])
    run_ranks("tests.stack.ranks.training_rank", directory, *names, env=LOOPBACK)
    return directory


# The plain loop


def places(sample: Trainable) -> list[int]:
    return [t for t in range(1, len(sample.token_ids)) if sample.policy_mask[t]]


def trained(sample: Trainable, case: Case, version: int) -> list[float]:
    limit = case.mask_staleness if case.mask_staleness >= 0 else 99
    return [float(version - sample.versions[t] <= limit) for t in places(sample)]


def log_softmax_of(model: torch.nn.Module, sample: Trainable) -> Tensor:
    ids = torch.tensor(sample.token_ids.astype(np.int64))[None]
    return torch.log_softmax(model(input_ids=ids).logits[0] / TEMPERATURE, dim=-1)


def plain_loss(model: torch.nn.Module, samples: list[Trainable], old: dict[str, Tensor], case: Case, v: int) -> Tensor:
    """The case's loss over one whole optimizer step."""
    options = {"kind": "ppo", "correction": "tis", "aggregation": "token"} | case.objective
    weights = {s.sample_id: torch.tensor(trained(s, case, v)) for s in samples}
    num_tokens = sum(float(w.sum()) for w in weights.values())
    num_sequences = sum(bool(w.any()) for w in weights.values())
    loss = torch.zeros(())
    for s in samples:
        w, where = weights[s.sample_id], places(s)
        log_p = log_softmax_of(model, s)
        steps = torch.tensor(where)
        lp = log_p[steps - 1, torch.tensor(s.token_ids.astype(np.int64))[steps]]
        ref, behavior, adv = (torch.tensor(x[where]) for x in (s.ref_logprobs, s.behavior_logprobs, s.advantages))
        proximal = old[s.sample_id]
        if options["kind"] == "gspo":
            mean = ((lp - proximal) * w).sum() / max(1.0, float(w.sum()))
            ratio = mean.exp() * torch.ones_like(lp)
        else:
            ratio = (lp - proximal).exp()
        term = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        if options["correction"] == "tis":
            term = term * (proximal - behavior).exp().clamp(0.0, 2.0)
        entropy = -(log_p[steps - 1].exp() * log_p[steps - 1]).sum(-1)
        d = lp - ref
        k3 = (torch.exp(-d) - 1 + d).clamp(-10, 10)
        term = term + options.get("kl_coef", 0.0) * k3 - options.get("entropy_coef", 0.0) * entropy
        if options["aggregation"] == "token":
            loss = loss + (term * w).sum() / num_tokens
        elif options["aggregation"] == "sequence":
            loss = loss + (term * w).sum() / max(1.0, float(w.sum())) / num_sequences
        else:
            loss = loss + (term * w).sum() / (num_sequences * options["length"])
    return loss


def plain_balance(model: torch.nn.Module, batch: Batch) -> Tensor:
    """transformers' own load-balancing loss of each micro-batch of two ranks, a mean by their tokens."""
    terms = []
    for part in batch.split(2):
        for indices in part.micro_batches:
            ids = [torch.tensor(part.samples[i].token_ids[:-1].astype(np.int64)) for i in indices]
            if ids:
                rows = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
                real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
                found = model(input_ids=rows, attention_mask=real, output_router_logits=True).aux_loss
                terms.append(found * sum(map(len, ids)))
    return torch.stack(terms).sum() / sum(sample.token_ids.size - 1 for sample in batch.samples)


def plain_steps(
    case: Case, directory: Path, *, moved: bool = False
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """(gradient of every optimizer step, final weights); `moved`: half of the weights begin a last place nearer 0."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory / case.model,
        dtype=torch.float32,
        trust_remote_code=case.experts,
        attn_implementation="eager" if case.windowed else None,
    )
    if moved:
        chance = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weights in model.parameters():
                chosen = torch.rand(weights.shape, generator=chance) < 0.5
                weights.copy_(torch.where(chosen, torch.nextafter(weights, torch.zeros_like(weights)), weights))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    gradients = []
    for number in range(BATCHES):
        samples, version = make_batch(number, case, first=FIRST).samples, FIRST + number
        with torch.no_grad():
            old = {
                s.sample_id: torch.stack([log_softmax_of(model, s)[t - 1, int(s.token_ids[t])] for t in places(s)])
                for s in samples
            }
        for _ in range(case.epochs):
            for indices in np.array_split(np.arange(len(samples)), case.optimizer_steps):
                optimizer.zero_grad()
                loss = plain_loss(model, [samples[i] for i in indices], old, case, version)
                if case.balance:
                    loss = loss + case.balance * plain_balance(model, make_batch(number, case, first=FIRST))
                loss.backward()
                gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
                if case.clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
    return gradients, {n: p.detach() for n, p in model.named_parameters()}


def worst(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    assert ours.keys() == plain.keys()
    return max(float((ours[name] - plain[name]).abs().max()) for name in plain)


def cosine(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    flat = [torch.cat([tensors[name].float().flatten() for name in plain]) for tensors in (ours, plain)]
    return float(torch.nn.functional.cosine_similarity(*flat, dim=0))


def named(cases: list[Case]) -> dict[str, Any]:
    return {"argvalues": cases, "ids": [case.name for case in cases]}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_ranks_of_one_machine_listen_on_it_only(gang_dir: Path, rank: int) -> None:
    addresses = json.loads((gang_dir / f"listening-{rank}.json").read_text())
    assert addresses and all(map(is_loopback, addresses))


@pytest.mark.parametrize("case", **named([case for case in CASES if not case.half]))
def test_gradients_and_weights_equal_the_plain_loop(case: Case, gang_dir: Path) -> None:
    found = torch.load(gang_dir / f"{case.name}.pt")
    gradients, weights = plain_steps(case, gang_dir)
    assert len(found["gradients"]) == len(gradients) == BATCHES * case.epochs * case.optimizer_steps
    sizes = [max(float(g.abs().max()) for g in gradient.values()) for gradient in gradients]
    assert min(sizes) > 1e-3, "a gradient of nothing would prove nothing"
    bars = [(1e-5 if case.sequence > 1 or case.tensor > 1 else 2e-5) * max(1.0, size) for size in sizes]
    errors = list(map(worst, found["gradients"], gradients))
    if any(error > bar for error, bar in zip(errors, bars, strict=True)):
        # Where a step enlarges a rounding, processors differ: no closer than the plain loop to itself.
        roundings = map(worst, plain_steps(case, gang_dir, moved=True)[0], gradients)
        bars = list(map(max, bars, roundings))
    assert all(error <= bar for error, bar in zip(errors, bars, strict=True)), (errors, bars)
    assert worst(found["weights"], weights) <= 1e-5


@pytest.mark.parametrize("case", **named([case for case in CASES if case.half]))
def test_half_precision_goes_the_same_way(case: Case, gang_dir: Path) -> None:
    found = torch.load(gang_dir / f"{case.name}.pt")
    gradients, _ = plain_steps(case, gang_dir)
    assert {w.dtype for w in found["weights"].values()} == {torch.bfloat16}
    assert {g.dtype for gradient in found["gradients"] for g in gradient.values()} == {torch.float32}
    likeness = [cosine(*pair) for pair in zip(found["gradients"], gradients, strict=True)]
    assert likeness[0] > 0.995
    assert min(likeness) > 0.9


@pytest.mark.parametrize("case", **named([case for case in CASES if case.tensor > 1]))
def test_what_ranks_with_parts_of_a_model_have_whole_stays_equal(case: Case, gang_dir: Path) -> None:
    assert json.loads((gang_dir / f"{case.name}.json").read_text())["alike"]


def test_the_average_of_a_divided_model_is_exported_whole(gang_dir: Path) -> None:
    (case,) = (case for case in CASES if "ema_decay" in case.settings)
    gradients, weights = plain_steps(case, gang_dir)
    exported = load_file(gang_dir / f"{case.name}-export" / "ema" / "model.safetensors")
    clipped = [min(1.0, case.clip / float(torch.stack([g.norm() for g in one.values()]).norm())) for one in gradients]
    for name, last in weights.items():
        steps = [LR * share * one[name] for share, one in zip(clipped, gradients, strict=True)]
        average = value = last + torch.stack(steps).sum(dim=0)
        for step in steps:
            value = value - step
            average = DECAY * average + (1 - DECAY) * value
        torch.testing.assert_close(exported[name], average, rtol=0, atol=2e-6)
        assert not torch.equal(exported[name], last)


@pytest.mark.parametrize("name", ["tree", "tree_of_old_tokens"])
def test_a_tree_computes_fewer_tokens_than_its_samples_have(name: str, gang_dir: Path) -> None:
    (case,) = (case for case in CASES if case.name == name)
    told = json.loads((gang_dir / f"{name}.json").read_text())["updates"]
    for version, update in enumerate(told):
        samples = make_batch(version, case).samples
        unique = num_unique([sample.token_ids[:-1] for sample in samples])
        assert unique <= update["computed"] < sum(sample.token_ids.size - 1 for sample in samples)


def test_the_load_balancing_loss_is_told_without_its_coefficient(gang_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    case = next(c for c in CASES if c.name == "balanced")
    model = AutoModelForCausalLM.from_pretrained(gang_dir / "balanced", dtype=torch.float32)
    first, *_ = json.loads((gang_dir / "balanced.json").read_text())["updates"]
    with torch.no_grad():
        expected = float(plain_balance(model, make_batch(0, case, first=FIRST)))
    assert first["stats"]["router_aux_loss"] == pytest.approx(expected, rel=1e-4) and expected > 1
    assert "router_aux_loss" not in json.loads((gang_dir / "ppo_tis.json").read_text())["updates"][0]["stats"]


def test_the_clipped_gradient_norm_is_told_before_clipping(gang_dir: Path) -> None:
    clipped = [c for c in CASES if c.clip and not c.half and (gang_dir / f"{c.name}.json").exists()]
    assert len(clipped) > 1
    for case in clipped:
        told = json.loads((gang_dir / f"{case.name}.json").read_text())["updates"]
        gradients, _ = plain_steps(case, gang_dir)
        norms = [float(torch.stack([g.norm() for g in gradient.values()]).norm()) for gradient in gradients]
        assert [u["grad_norm"] for u in told] == pytest.approx(norms, rel=1e-4)
        assert min(norms) > case.clip


@pytest.mark.parametrize(("pieces", "whole"), [("pieces", "clipped_gradient"), ("pieces_stage_0", "stage_0")])
def test_a_batch_in_pieces_has_the_figures_of_the_whole_one(pieces: str, whole: str, gang_dir: Path) -> None:
    told = [json.loads((gang_dir / f"{name}.json").read_text())["updates"] for name in (pieces, whole)]
    for ours, theirs in zip(*told, strict=True):
        assert ours["stats"] == pytest.approx(theirs["stats"], rel=1e-4, abs=1e-6)
        assert (ours["grad_norm"], ours["gap"]) == pytest.approx((theirs["grad_norm"], theirs["gap"]), rel=1e-4)


def test_behavior_gap_is_that_of_the_proximal_policy(gang_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    case = next(c for c in CASES if c.name == "optimizer_steps")
    model = AutoModelForCausalLM.from_pretrained(gang_dir / "tied", dtype=torch.float32)
    gaps = []
    with torch.no_grad():
        for s in make_batch(0, case).samples:
            log_p = log_softmax_of(model, s)
            gaps += [abs(float(log_p[t - 1, int(s.token_ids[t])]) - float(s.behavior_logprobs[t])) for t in places(s)]
    told = json.loads((gang_dir / f"{case.name}.json").read_text())["updates"][0]
    assert told["gap"] == pytest.approx(np.mean(gaps), rel=1e-5)


@pytest.mark.parametrize("name", ["ppo_tis", "untied", "stage_2", "tensor_stage_1", "tensor_stage_2"])
def test_export_loads_in_transformers(name: str, gang_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = torch.load(gang_dir / f"{name}.pt")
    model = AutoModelForCausalLM.from_pretrained(gang_dir / f"{name}-export", dtype=torch.float32)
    assert worst(found["weights"], {n: p.detach() for n, p in model.named_parameters()}) == 0.0
    assert (gang_dir / f"{name}-export" / "tokenizer_config.json").exists()
    scored = json.loads((gang_dir / f"{name}.json").read_text())["probe"]
    for sequence, told in zip([[1, 2, 3, 4], [5, 6]], scored, strict=True):
        with torch.no_grad():
            log_p = torch.log_softmax(model(input_ids=torch.tensor([sequence])).logits[0], dim=-1)
        expected = [float(log_p[t - 1, sequence[t]]) for t in range(1, len(sequence))]
        assert told == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_trainer_goes_on_exactly(name: str, gang_dir: Path) -> None:
    """Adam: master weights and both moments have to come back for the next step to be the same."""
    straight, resumed = torch.load(gang_dir / f"{name}-resumed.pt")
    assert worst(straight, resumed) == 0.0

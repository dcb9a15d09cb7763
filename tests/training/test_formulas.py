"""Formulas against values worked out another way: what the tests file by file do not ask.

Expected gradients off the policy, packed rows and their neighbours down to the gradients, GSPO with an
advantage that varies by token, and the running graph's advantages against `advantages` called whole.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.graph.ports import Members
from flowrl.messages import Scored, Trainable
from flowrl.nodes import GroupAdvantage, TokenBatch
from flowrl.testing import run_node, scored
from flowrl.training.advantages import WHITENED_ESTIMATORS, Estimate, compute_advantages, stack_rows
from flowrl.training.layouts import Placing
from flowrl.training.loss.loss_formulas import kl_estimate, policy_loss
from flowrl.training.loss.objective import LossInputs, Totals, loss_masks
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.preference_objectives import DPOObjective
from flowrl.training.micro_batches import make_micro_batch
from flowrl.training.model.policy_model import PolicyModel, load_policy_model
from flowrl.training.model.row_layout import lay_out
from tests.training.training_cases import CASES, make_batch, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT: dict[str, float] = {"rtol": 0.0, "atol": 1e-12}


# KL


def of_logits(logits: Tensor, loss_of: Any) -> Tensor:
    """The gradient of a loss of log π with respect to the logits."""
    leaf = logits.clone().requires_grad_()
    loss_of(torch.log_softmax(leaf, -1)).backward()
    assert leaf.grad is not None
    return leaf.grad


def test_expected_gradients_of_the_kl_losses_on_tokens_of_another_policy() -> None:
    """E over x ~ π_b: only the weighted k3 still follows KL(π‖ref)."""
    draw = torch.Generator().manual_seed(2)
    logits, behavior, ref = (torch.randn(5, generator=draw, dtype=torch.float64) * 0.5 for _ in range(3))
    behavior, ref = torch.log_softmax(behavior, -1), torch.log_softmax(ref, -1)

    def expected(estimator: Any) -> Tensor:
        def loss(log_p: Tensor) -> Tensor:
            return (behavior.exp() * kl_estimate(log_p, ref, estimator=estimator, behavior_logprobs_BT=behavior)).sum()

        return of_logits(logits, loss)

    exact = of_logits(logits, lambda log_p: (log_p.exp() * (log_p - ref)).sum())
    torch.testing.assert_close(expected("k3_unbiased"), exact, **EXACT)
    for biased in ("k1", "k2", "k3"):
        assert float((expected(biased) - exact).abs().max()) > 0.01


def test_k1_is_no_loss() -> None:
    with pytest.raises(ConfigError, match="the expected gradient of k1 is zero"):
        PolicyObjective(kl_coef=0.1, kl_estimator="k1")


# Policy losses


@pytest.mark.parametrize("seed", range(4))
def test_gspo_where_the_advantage_varies_by_token(seed: int) -> None:
    """d/dlogits of −min(s·A_t, clip(s)·A_t), with ∂s/∂log π_t = s at each token for itself."""
    draw = torch.Generator().manual_seed(seed)
    logprobs, old, values = (torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    leaf = (logprobs * 0.3).requires_grad_()
    policy_loss(leaf, old * 0.3, values, mask, kind="gspo", clip_low=0.1, clip_high=0.15, aggregation="sequence")[
        0
    ].backward()
    expected = torch.zeros_like(logprobs)
    for b in range(3):
        chosen = mask[b]
        s = float(((logprobs - old)[b, chosen] * 0.3).mean().exp())
        for t in torch.nonzero(chosen)[:, 0].tolist():
            a = float(values[b, t])
            passes = s * a <= min(max(s, 0.9), 1.15) * a
            expected[b, t] = -s * a * passes / int(chosen.sum()) / 3
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected, **EXACT)
    assert float(expected.abs().max()) > 0


def test_ppo_passes_no_gradient_where_the_clipped_term_is_the_smaller_one() -> None:
    ratios = torch.tensor([[0.5, 0.5, 1.5, 1.5, 1.0]], dtype=torch.float64)
    signs = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]], dtype=torch.float64)
    leaf = ratios.log().requires_grad_()
    loss, stats = policy_loss(leaf, torch.zeros_like(leaf), signs, torch.ones_like(leaf))
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [pytest.approx([-0.1, 0.0, 0.0, 0.3, -0.2])]
    assert loss.item() == pytest.approx(-(0.5 - 0.8 + 1.2 - 1.5 + 1.0) / 5)
    assert float(stats["clip_fraction"]) == pytest.approx(2 / 5)


# Preferences


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_ipo_compares_means_per_token_and_dpo_sums(kind: Any) -> None:
    """A pair of 2 and 5 tokens, its rejected completion first."""
    samples = [preference(0, -1, [-1.0] * 5, [-1.4] * 5), preference(1, 1, [-2.0, -0.5], [-2.2, -1.1])]
    objective = DPOObjective(beta=0.4, kind=kind)
    masks = [s.policy_mask for s in samples]
    piece = make_micro_batch(samples, masks, objective, version=0, layout="padded", device=torch.device("cpu"))
    nothing = piece.mask_BT.new_zeros(2, 0)
    logprobs = piece.behavior_BT
    totals = Totals(piece.num_tokens, piece.num_sequences, 1, 1)
    seen = LossInputs(
        logprobs, logprobs, logprobs, piece.mask_BT, piece.columns, totals, nothing, piece.labels_B, piece.pairs_P2, 0.0
    )
    loss, _ = objective.loss(seen)
    chosen, rejected = 0.2 + 0.6, 5 * 0.4
    h = chosen / 2 - rejected / 5 if kind == "ipo" else chosen - rejected
    expected = (h - 1 / 0.8) ** 2 if kind == "ipo" else math.log(1 + math.exp(-0.4 * h))
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def preference(member: int, label: int, logprobs: list[float], ref: list[float]) -> Trainable:
    zeros = [0.0] * 3
    fields = vars(scored(member, 0.0, response=len(ref), behavior_logprobs=np.array(zeros + logprobs, np.float32)))
    return Trainable(**fields | {"ref_logprobs": np.array(zeros + ref, np.float32), "label": label, "pair": "p"})


# Which tokens are trained


def test_only_the_policys_own_tokens_are_trained() -> None:
    samples = make_batch(0, CASES[0]).samples
    assert any((~s.policy_mask[s.prompt_tokens :]).any() for s in samples)
    for sample, mask in zip(samples, loss_masks(samples, -1, 0), strict=True):
        assert mask.tolist() == sample.policy_mask.tolist()


def test_a_token_as_old_as_allowed_is_trained_and_an_older_one_is_not() -> None:
    samples = make_batch(5, CASES[0]).samples
    masks = loss_masks(samples, 1, 5)
    ages = [(5 - s.versions)[s.policy_mask].tolist() for s in samples]
    kept = [mask[s.policy_mask].tolist() for mask, s in zip(masks, samples, strict=True)]
    assert kept == [[age <= 1 for age in row] for row in ages]
    assert {age for row in ages for age in row} == {0, 1, 2}


# Packing


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    path = tmp_path_factory.mktemp("model")
    make_model(path, tied=True)
    return load_policy_model(path)


def gradient_of(model: PolicyModel, row: int, *, layout: Placing, changed: int | None = None) -> Tensor:
    """Of the sum of one sample's logprobs, in a micro-batch with its neighbours, to all parameters."""
    samples = make_batch(0, CASES[0]).samples[:4]
    token_ids = [s.token_ids.copy() for s in samples]
    if changed is not None:
        token_ids[changed] = (token_ids[changed] + 7) % 40
    rows = lay_out(token_ids, [s.policy_mask for s in samples], layout=layout)
    model.zero_grad()
    rows.spread_values(model(rows, 0.8)[0])[row].sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("row", range(4))
def test_gradients_of_packed_rows_equal_those_of_padded_ones(model: PolicyModel, row: int) -> None:
    padded = gradient_of(model, row, layout="padded")
    assert float(padded.abs().max()) > 0.1
    torch.testing.assert_close(gradient_of(model, row, layout="packed"), padded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
@pytest.mark.parametrize("changed", [0, 2])
def test_a_neighbour_changes_no_gradient(model: PolicyModel, layout: Placing, changed: int) -> None:
    before, after = (gradient_of(model, 1, layout=layout, changed=which) for which in (None, changed))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    own = gradient_of(model, 1, layout=layout, changed=1)
    assert float((own - before).abs().max()) > 0.1


# The graph and `advantages` called whole


@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_baseline", "dr_grpo", "rloo", "group_norm", "gae"])
def test_advantage_node_and_batcher_give_what_advantages_gives(estimator: Any) -> None:
    draw = np.random.default_rng(3)
    groups = [[_rollout(draw, group, member) for member in range(size)] for group, size in enumerate((3, 2, 4))]
    gamma, lam = (0.9, 0.8) if estimator == "gae" else (1.0, 1.0)
    estimate = Estimate(estimator, gamma=gamma, lam=lam, kl_coef=0.2, kl_estimator="k3")
    node, batcher = GroupAdvantage(estimate, size=4), TokenBatch(3, whiten=_whiten(estimator))
    made = [node.make_group(Members(f"g{n}", n, 4, tuple(group), ())) for n, group in enumerate(groups)]
    (batch,) = run_node(batcher, {"groups": made}).sent("batches")
    found = batch.samples

    samples = [sample for group in groups for sample in group]
    mask = stack_rows([s.policy_mask for s in samples]).astype(bool)
    d = stack_rows([s.behavior_logprobs for s in samples]) - stack_rows([np.asarray(s.ref_logprobs) for s in samples])
    turns = np.zeros(mask.shape)
    for row, sample in zip(turns, samples, strict=True):
        for place, reward in sample.turn_rewards:
            row[place] = reward
    whole, returns = compute_advantages(
        [s.reward for s in samples],
        [s.group_id for s in samples],
        mask,
        estimator=estimator,
        values_BT=stack_rows([np.asarray(s.values) for s in samples]),
        kl_BT=np.exp(-d) - 1 + d,
        kl_coef=0.2,
        gamma=gamma,
        lam=lam,
        turns_BT=turns,
    )
    for sample, row, row_returns in zip(found, whole, returns, strict=True):
        length = len(sample.token_ids)
        np.testing.assert_allclose(sample.advantages, row[:length], atol=1e-6)
        if estimator == "gae":
            np.testing.assert_allclose(np.asarray(sample.returns), row_returns[:length], atol=1e-6)


def _whiten(estimator: str) -> Any:
    return "full" if estimator in WHITENED_ESTIMATORS else "off"


def _rollout(draw: np.random.Generator, group: int, member: int) -> Scored:
    response = int(draw.integers(2, 9))
    mask = np.array([False] * 3 + [True] * response)

    def column(scale: float) -> Any:
        return np.where(mask, draw.normal(-1, scale, mask.size), 0).astype(np.float32)

    return scored(
        member,
        float(draw.normal()),
        response=response,
        group=f"g{group}",
        behavior_logprobs=column(0.3),
        ref_logprobs=column(0.3),
        values=column(0.5),
        turn_rewards=((3, 0.5), (2 + response, -0.25)) if member == 1 else (),
    )

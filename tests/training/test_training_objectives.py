"""Policy and value losses in float64 against formulas written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.training.loss.loss_formulas import aggregate_terms, correction_weights, kl_estimate, policy_loss, value_loss
from flowrl.training.loss.policy_kinds import KINDS

MASK = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
B, T = MASK.shape


def rows(seed: int, scale: float = 0.4, shift: float = -2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, generator=generator, dtype=torch.float64) * scale + shift


LOGPROBS, OLD, BEHAVIOR, ADVANTAGES = rows(1), rows(2), rows(3), rows(4, 1.0, 0.0)


def tokens() -> list[tuple[int, int]]:
    return [(b, t) for b in range(B) for t in range(T) if MASK[b, t]]


def ppo(logprob: float, old: float, advantage: float, low: float = 0.2, high: float = 0.2) -> float:
    ratio = math.exp(logprob - old)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def by_token(of: Any) -> float:
    return sum(of(b, t) for b, t in tokens()) / len(tokens())


def at(x: Tensor, b: int, t: int) -> float:
    return float(x[b, t])


def test_ppo_is_the_masked_mean_of_the_clipped_surrogate() -> None:
    loss, stats = policy_loss(LOGPROBS, OLD, ADVANTAGES, MASK, clip_low=0.1, clip_high=0.3)
    expected = by_token(lambda b, t: ppo(at(LOGPROBS, b, t), at(OLD, b, t), at(ADVANTAGES, b, t), 0.1, 0.3))
    assert float(loss) == pytest.approx(expected, abs=1e-12)

    def is_clipped(b: int, t: int) -> bool:
        ratio, advantage = math.exp(at(LOGPROBS, b, t) - at(OLD, b, t)), at(ADVANTAGES, b, t)
        return min(max(ratio, 0.9), 1.3) * advantage < ratio * advantage

    assert float(stats["clip_fraction"]) == pytest.approx(by_token(is_clipped))
    assert 0 < float(stats["clip_fraction"]) < 1
    assert float(stats["ratio_mean"]) == pytest.approx(
        by_token(lambda b, t: math.exp(at(LOGPROBS, b, t) - at(OLD, b, t)))
    )


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    loss, _ = policy_loss(LOGPROBS + 1.5, OLD, ADVANTAGES, MASK, dual_clip=2.0)

    def token(b: int, t: int) -> float:
        plain, advantage = ppo(at(LOGPROBS, b, t) + 1.5, at(OLD, b, t), at(ADVANTAGES, b, t)), at(ADVANTAGES, b, t)
        return min(plain, -2.0 * advantage) if advantage < 0 else plain

    assert float(loss) == pytest.approx(by_token(token), abs=1e-12)
    assert float(loss) < float(policy_loss(LOGPROBS + 1.5, OLD, ADVANTAGES, MASK)[0])


def test_gspo_takes_the_sequence_ratio_and_deals_its_gradient_to_the_tokens() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    advantage_B1 = ADVANTAGES[:, :1].expand(B, T)
    loss, _ = policy_loss(
        logprobs, OLD, advantage_B1, MASK, kind="gspo", clip_low=5.0, clip_high=5.0, aggregation="sequence"
    )
    loss.backward()
    again = LOGPROBS.clone().requires_grad_()
    plain = torch.zeros((), dtype=torch.float64)
    for b in range(3):
        mean = (again[b] - OLD[b])[MASK[b]].mean()
        plain = plain - mean.exp() * ADVANTAGES[b, 0] / 3
    plain.backward()
    torch.testing.assert_close(loss, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(logprobs.grad, again.grad, rtol=0, atol=1e-12)


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    loss, _ = policy_loss(logprobs, OLD, ADVANTAGES, MASK, kind="cispo", clip_high=1.1)
    loss.backward()
    ratio = (LOGPROBS - OLD).exp().clamp(0.0, 1.1)
    torch.testing.assert_close(logprobs.grad, -ratio * ADVANTAGES * MASK / MASK.sum(), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="clip_high"):
        policy_loss(LOGPROBS, OLD, ADVANTAGES, MASK, kind="cispo")


def test_reinforce_is_minus_advantage_times_logprob() -> None:
    loss, _ = policy_loss(LOGPROBS, OLD, ADVANTAGES, MASK, kind="reinforce")
    assert float(loss) == pytest.approx(by_token(lambda b, t: -at(ADVANTAGES, b, t) * at(LOGPROBS, b, t)))


def u(b: int, t: int) -> float:
    return math.exp(at(OLD, b, t) - at(BEHAVIOR, b, t))


def mean_u(b: int) -> float:
    deltas = [at(OLD, b, t) - at(BEHAVIOR, b, t) for t in range(T) if MASK[b, t]]
    return math.exp(sum(deltas) / len(deltas))


def product_u(b: int) -> float:
    return math.exp(sum(at(OLD, b, t) - at(BEHAVIOR, b, t) for t in range(T) if MASK[b, t]))


LOW, HIGH = 0.8, 1.25
WEIGHTS = {
    ("tis", "token"): lambda b, t: min(max(u(b, t), LOW), HIGH),
    ("tis", "sequence"): lambda b, t: min(max(product_u(b), LOW), HIGH),
    ("icepop", "token"): lambda b, t: u(b, t) if LOW <= u(b, t) <= HIGH else 0.0,
    ("sequence_mask", "token"): lambda b, t: min(max(u(b, t), LOW), HIGH) if LOW <= mean_u(b) <= HIGH else 0.0,
    ("decoupled", "token"): lambda b, t: u(b, t) if u(b, t) <= HIGH else 0.0,
}


@pytest.mark.parametrize(("correction", "level"), WEIGHTS)
def test_corrections_weigh_numerators_alone(correction: Any, level: Any) -> None:
    weight = WEIGHTS[correction, level]
    old, behavior = OLD.clone().requires_grad_(), BEHAVIOR
    loss, stats = policy_loss(
        LOGPROBS,
        old,
        ADVANTAGES,
        MASK,
        behavior_logprobs_BT=behavior,
        correction=correction,
        correction_range=(LOW, HIGH),
        correction_level=level,
    )
    expected = by_token(lambda b, t: weight(b, t) * ppo(at(LOGPROBS, b, t), at(OLD, b, t), at(ADVANTAGES, b, t)))
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert float(stats["correction_mean"]) == pytest.approx(by_token(weight))
    weights = correction_weights(old, behavior, MASK, correction, (LOW, HIGH), level)
    assert not weights.requires_grad


def test_a_correction_without_behavior_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="behavior_logprobs_BT"):
        policy_loss(LOGPROBS, OLD, ADVANTAGES, MASK, correction="tis")


def test_log_ratios_are_clamped_so_that_nothing_overflows() -> None:
    far = OLD + 1000.0
    loss, _ = policy_loss(far, OLD, -ADVANTAGES.abs(), MASK, clip_low=0.0, clip_high=0.0)
    assert float(loss) == pytest.approx(by_token(lambda b, t: math.exp(20.0) * abs(at(ADVANTAGES, b, t))))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_at_a_masked_place_reaches_loss_or_gradient(kind: Any) -> None:
    def run(garbage: float) -> tuple[Tensor, Tensor]:
        logprobs = torch.where(MASK, LOGPROBS, garbage).requires_grad_()
        arguments = [torch.where(MASK, values, garbage) for values in (OLD, ADVANTAGES)]
        clip = {"clip_high": 1.2} if "clip_high" in KINDS[kind].defaults else {}
        loss, _ = policy_loss(logprobs, *arguments, MASK, kind=kind, **clip)
        loss.backward()
        assert logprobs.grad is not None
        return loss, logprobs.grad

    for clean, dirty in zip(run(0.0), run(-math.inf), strict=True):
        assert torch.equal(clean, dirty)


def test_aggregations() -> None:
    values = rows(7)
    assert float(aggregate_terms(values, MASK)) == pytest.approx(by_token(lambda b, t: at(values, b, t)))
    means = [float(values[b][MASK[b]].mean()) for b in range(3)]
    assert float(aggregate_terms(values, MASK, "sequence")) == pytest.approx(sum(means) / 3)
    total = sum(at(values, b, t) for b, t in tokens())
    assert float(aggregate_terms(values, MASK, "constant", length=7)) == pytest.approx(total / (3 * 7))
    with pytest.raises(ValueError, match="length"):
        aggregate_terms(values, MASK, "constant")


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_parts_with_global_denominators_add_up_to_the_whole(aggregation: Any) -> None:
    def loss(part: slice, **totals: int) -> float:
        arguments = (LOGPROBS[part], OLD[part], ADVANTAGES[part], MASK[part])
        return float(policy_loss(*arguments, aggregation=aggregation, length=9, **totals)[0])

    totals = {"num_tokens": int(MASK.sum()), "num_sequences": 3}
    parts = [loss(part, **totals) for part in (slice(0, 1), slice(1, 3), slice(3, 4))]
    assert sum(parts) == pytest.approx(loss(slice(0, 4)), abs=1e-12)
    assert parts[2] == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_unbiased"])
def test_kl_estimators(estimator: Any) -> None:
    found = kl_estimate(LOGPROBS, OLD, estimator=estimator, behavior_logprobs_BT=BEHAVIOR)
    for b, t in tokens():
        d = at(LOGPROBS, b, t) - at(OLD, b, t)
        k3 = math.exp(-d) - 1 + d
        weight = math.exp(at(LOGPROBS, b, t) - at(BEHAVIOR, b, t))
        expected = {"k1": d, "k2": d * d / 2, "k3": k3, "k3_unbiased": k3 * weight}[estimator]
        assert at(found, b, t) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_clamped_and_its_gradient_stays_finite(estimator: Any) -> None:
    logprobs = torch.tensor([-900.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    found = kl_estimate(logprobs, torch.tensor([-1.0, -900.0, -1.0], dtype=torch.float64), estimator=estimator)
    assert found.abs().max() <= 10
    found.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()


def expected_gradient(estimator: Any, logits: Tensor, ref: Tensor) -> Tensor:
    """E over x ~ π of the estimator's gradient, exactly, on a small categorical."""
    leaf = logits.clone().requires_grad_()
    log_p = torch.log_softmax(leaf, -1)
    estimate = kl_estimate(log_p, ref, estimator=estimator, behavior_logprobs_BT=log_p.detach())
    (log_p.detach().exp() * estimate).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_expected_gradients_of_the_kl_losses() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5, 0.0], dtype=torch.float64)
    ref = torch.log_softmax(torch.tensor([0.1, 0.4, -0.3, 0.2], dtype=torch.float64), -1)

    def exact(reverse: bool) -> Tensor:
        leaf = logits.clone().requires_grad_()
        log_p = torch.log_softmax(leaf, -1)
        divergence = (log_p.exp() * (log_p - ref)).sum() if reverse else (ref.exp() * (ref - log_p)).sum()
        divergence.backward()
        assert leaf.grad is not None
        return leaf.grad

    close = {"rtol": 0.0, "atol": 1e-9}
    torch.testing.assert_close(expected_gradient("k1", logits, ref), torch.zeros(4, dtype=torch.float64), **close)
    torch.testing.assert_close(expected_gradient("k2", logits, ref), exact(reverse=True), **close)
    torch.testing.assert_close(expected_gradient("k3", logits, ref), exact(reverse=False), **close)
    torch.testing.assert_close(expected_gradient("k3_unbiased", logits, ref), exact(reverse=True), **close)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss(clip: float | None) -> None:
    values, old, returns = rows(11, 1.0, 0.0), rows(12, 1.0, 0.0), rows(13, 1.0, 0.0)

    def token(b: int, t: int) -> float:
        v, o, r = at(values, b, t), at(old, b, t), at(returns, b, t)
        near = o + min(max(v - o, -(clip or 0)), clip or 0)
        return 0.5 * (max((v - r) ** 2, (near - r) ** 2) if clip else (v - r) ** 2)

    loss, stats = value_loss(values, old, returns, MASK, clip=clip)
    assert float(loss) == pytest.approx(by_token(token), abs=1e-12)
    assert (float(stats["clip_fraction"]) > 0) == (clip is not None)

"""DPO and KTO as the trainer runs them: one micro-batch or many, the same loss as the formula over the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Mismatched
from flowrl.training.loss.objective import Objective, Totals
from flowrl.training.loss.preference_objectives import DPOObjective, KTOObjective
from flowrl.training.micro_batches import make_micro_batch
from tests.training.objective_rig import CPU, logprobs, run, samples
from tests.training.test_training_preferences import dpo_of_pair, sigmoid


def whole(means: bool = False) -> list[torch.Tensor]:
    """(π_c, π_r, ref_c, ref_r) of the three pairs."""
    drawn = [d.detach() for d in logprobs()]
    ref = [torch.from_numpy(s.ref_logprobs[2:]) for s in samples() if s.ref_logprobs is not None]
    if means:
        policy, reference = (torch.stack([x.mean() for x in side]) for side in (drawn, ref))
    else:
        policy, reference = (torch.stack([x.sum() for x in side]) for side in (drawn, ref))
    return [policy[::2], policy[1::2], reference[::2], reference[1::2]]


OBJECTIVES = {
    "dpo": DPOObjective(beta=0.3),
    "ipo": DPOObjective(beta=0.3, kind="ipo"),
    "cdpo": DPOObjective(beta=0.3, kind="cdpo", label_smoothing=0.2),
}
CUTS = [[[0, 1, 2, 3, 4, 5]], [[2, 3], [0, 1, 4, 5]], [[4, 5], [0, 1], [], [2, 3]]]


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("cut", CUTS)
def test_a_dpo_step_is_the_formula_over_the_whole_batch(kind: Any, cut: list[list[int]]) -> None:
    objective = OBJECTIVES[kind]
    found = run(objective, cut)
    chosen, rejected, ref_chosen, ref_rejected = whole(means=kind == "ipo")
    h = (chosen - rejected) - (ref_chosen - ref_rejected)
    losses = [dpo_of_pair(of_pair, 0.3, kind, objective.label_smoothing) for of_pair in h.tolist()]
    assert found.loss == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert found.stats["preference_accuracy"] == pytest.approx(float((h > 0).float().mean()))
    assert found.stats["reward_margin"] == pytest.approx(0.3 * float(h.mean()), rel=1e-4)
    assert found.stats["chosen_reward"] == pytest.approx(0.3 * float((chosen - ref_chosen).mean()), rel=1e-4)
    assert found.stats["rejected_reward"] == pytest.approx(0.3 * float((rejected - ref_rejected).mean()), rel=1e-4)
    chosen, _, ref_chosen, _ = whole()
    assert found.stats["chosen_logprob_change"] == pytest.approx(float((chosen - ref_chosen).mean()), rel=1e-4)
    torch.testing.assert_close(found.gradient, run(objective, CUTS[0]).gradient)


def test_the_nll_of_the_chosen_is_a_mean_per_token() -> None:
    plain, with_nll = run(DPOObjective(), CUTS[0]), run(DPOObjective(nll_coef=0.5), CUTS[1])
    nll = np.mean([-float(d.detach().mean()) for d in logprobs()[::2]])
    assert with_nll.loss == pytest.approx(plain.loss + 0.5 * nll, rel=1e-5)
    assert with_nll.stats["chosen_nll"] == pytest.approx(nll, rel=1e-5)


def test_a_pair_with_one_half_masked_out_does_not_count() -> None:
    given = samples()
    masks = [s.policy_mask for s in given]
    masks[3] = np.zeros_like(masks[3])
    piece = make_micro_batch(given, masks, DPOObjective(), version=0, layout="padded", device=CPU)
    assert piece.pairs_P2.tolist() == [[0, 1], [4, 5]]
    assert piece.added_counts == (18, 5, 2, 3)
    assert not DPOObjective().enough(Totals(num_tokens=9, num_sequences=3))


@pytest.mark.parametrize("cut", [*CUTS, [[5], [0, 3], [1, 4, 2]]])
def test_a_kto_step_is_the_formula_over_the_whole_batch(cut: list[list[int]]) -> None:
    objective = KTOObjective(beta=0.2, desirable_weight=1.5, undesirable_weight=0.7)
    found = run(objective, cut, mismatched_kl=0.4)
    chosen, rejected, ref_chosen, ref_rejected = whole()
    good, bad = (chosen - ref_chosen).tolist(), (rejected - ref_rejected).tolist()
    losses = [1.5 * (1 - sigmoid(0.2 * (r - 0.4))) for r in good] + [0.7 * (1 - sigmoid(0.2 * (0.4 - r))) for r in bad]
    assert found.loss == pytest.approx(sum(losses) / 6, rel=1e-5)
    assert found.stats["z0"] == pytest.approx(0.4)
    assert found.stats["desirable_reward"] == pytest.approx(0.2 * sum(good) / 3, rel=1e-4)
    assert found.stats["undesirable_reward"] == pytest.approx(0.2 * sum(bad) / 3, rel=1e-4)


def test_the_baseline_is_never_negative() -> None:
    assert run(KTOObjective(), CUTS[0], mismatched_kl=-3.0).stats["z0"] == 0.0


def test_mismatched_completions_are_a_pass_of_their_own() -> None:
    first, second, *_ = samples()
    other = Mismatched(
        np.arange(9, dtype=np.int32), np.arange(9) >= 4, np.where(np.arange(9) >= 4, -1, 0).astype(np.float32)
    )
    given = [replace(first, mismatched=other), second]
    piece = make_micro_batch(
        given, [s.policy_mask for s in given], KTOObjective(), version=0, layout="padded", device=CPU
    )
    crossed = piece.mismatched
    assert crossed is not None
    assert crossed.counted_B.tolist() == [True, False]
    assert crossed.ref_B.tolist() == [-5.0, 0.0]
    assert crossed.rows.targets_N.tolist()[:5] == [4, 5, 6, 7, 8]


def test_one_completion_makes_no_kto_step() -> None:
    assert not KTOObjective().enough(Totals(num_tokens=5, num_sequences=1))
    assert KTOObjective().enough(Totals(num_tokens=5, num_sequences=2))


@pytest.mark.parametrize("objective", [DPOObjective(), KTOObjective()])
def test_samples_without_reference_logprobs_are_refused(objective: Objective) -> None:
    with pytest.raises(FlowrlError, match="'s0' has no reference logprobs"):
        objective.columns(replace(samples()[0], ref_logprobs=None))


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (DPOObjective, {"beta": 0}, "beta is 0; it has to be a number above 0"),
    (DPOObjective, {"kind": "kto"}, "kind is 'kto'; choose one of dpo, ipo, cdpo"),
    (DPOObjective, {"kind": "cdpo"}, "needs a label_smoothing above 0"),
    (DPOObjective, {"label_smoothing": 0.1}, "the other kinds need 0"),
    (DPOObjective, {"kind": "cdpo", "label_smoothing": 0.5}, "from 0 to below 0.5"),
    (DPOObjective, {"nll_coef": -1}, "nll_coef is -1"),
    (KTOObjective, {"beta": float("nan")}, "beta is nan"),
    (KTOObjective, {"desirable_weight": 0}, "desirable_weight is 0"),
]


@pytest.mark.parametrize(("kind", "options", "message"), WRONG)
def test_options_out_of_range_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)

"""Episodes with several sequences on their way to the loss: units, rows, masks, uses, figures, refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from flowrl.errors import ConfigError
from flowrl.messages import Batch, Group, Trainable, packed
from flowrl.messages.episode import Episode
from flowrl.models import Policy
from flowrl.nodes import BestOfN, PairMaker, TokenBatch
from flowrl.nodes.groups.batch import branch_metrics, repeated_tokens, require_advantages, value_question
from flowrl.nodes.scoring.reference import EpisodeReference
from flowrl.nodes.scoring.scoring_model import require_one_sequence
from flowrl.runtime.ledger.ledger_client import Use
from flowrl.runtime.ledger.token_digest import policy_spans, request_digest
from flowrl.testing import run_node
from flowrl.training.advantages import Estimate
from flowrl.training.batch_stats import BatchStats, length_name
from flowrl.training.loss.loss_formulas import aggregate_terms
from flowrl.training.loss.objective import loss_masks, trained_mask
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.micro_batches import make_micro_batch, split_in_rows
from tests.models.word_policy import WORDS, make_policy
from tests.nodes.episodes.branching_episodes import episode
from tests.nodes.groups import members

THREE = [[2, 3], [1], [4, 2]]
shapes = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4)


def trainable(member: int, shape: list[list[int]], **more: Any) -> Trainable:
    """With advantages that are all different."""
    one = episode(member, shape, [float(member)] * sum(map(len, shape)), **more)
    (made,) = Estimate("reinforce").make_trainables([one])
    return replace(made, advantages=np.arange(one.num_tokens, dtype=np.float32) * one.whole_mask)


def batch(samples: list[Trainable], **fields: int) -> Batch:
    return Batch(tuple(samples), (), num_sequences=len(samples), num_tokens=0, num_groups=1, **fields)


@given(
    made=st.lists(shapes, min_size=1, max_size=12),
    ranks=st.integers(1, 4),
    budget=st.sampled_from([0, 64, 200]),
    steps=st.integers(1, 3),
    stale=st.sampled_from([-1, 0, 1]),
)
def test_every_sampled_token_is_in_one_row_of_one_rank(
    made: list[list[list[int]]], ranks: int, budget: int, steps: int, stale: int
) -> None:
    samples = [trainable(m, shape, group=str(m), version=2) for m, shape in enumerate(made)]
    whole = batch(samples, token_budget=budget, optimizer_steps=steps, mask_staleness=stale)
    parts = whole.split(ranks)
    assert sorted(s.sample_id for part in parts for s in part.samples) == sorted(s.sample_id for s in samples)
    assert len({(part.step_ends, len(part.micro_batches)) for part in parts}) == 1
    seen, counted = [], 0
    for part in parts:
        rows, masks, shares = split_in_rows(part, loss_masks(part.samples, stale, 2))
        assert sorted(itertools.chain(*part.micro_batches)) == list(range(len(rows.samples)))
        for one in filter(None, part.micro_batches):
            assert not budget or len(one) * max(rows.samples[i].token_ids.size for i in one) <= budget
        seen += [(rows.samples[i], masks[i]) for i in range(len(masks))]
        counted += sum(bool(m.any()) if share is None else share.counts for m, share in zip(masks, shares, strict=True))
    expected = dict(zip([s.sample_id for s in samples], loss_masks(samples, stale, 2), strict=True))
    assert counted == sum(mask.any() for mask in expected.values())
    for sample in samples:
        rows_of_it = [(row, mask) for row, mask in seen if row.sample_id == sample.sample_id]
        np.testing.assert_array_equal(np.concatenate([m for _, m in rows_of_it]), expected[sample.sample_id])
        np.testing.assert_array_equal(np.concatenate([r.advantages for r, _ in rows_of_it]), sample.advantages)
        assert [r.token_ids.tolist() for r, _ in rows_of_it] == [s.token_ids.tolist() for s in sample.sequences]


@given(made=st.lists(shapes, min_size=2, max_size=12), ranks=st.integers(1, 4), steps=st.integers(1, 3))
def test_a_step_trains_the_same_samples_on_any_number_of_ranks(
    made: list[list[list[int]]], ranks: int, steps: int
) -> None:
    whole = batch([trainable(m, s, group=str(m)) for m, s in enumerate(made)], token_budget=64, optimizer_steps=steps)

    def steps_of(part: Batch) -> list[set[str]]:
        names = [s.sample_id for s in part.samples for _ in s.sequences]
        starts = (0, *part.step_ends[:-1])
        ends = zip(starts, part.step_ends, strict=True)
        return [{names[i] for one in part.micro_batches[start:end] for i in one} for start, end in ends]

    dealt = [steps_of(part) for part in whole.split(ranks)]
    assert [set.union(*step) for step in zip(*dealt, strict=True)] == steps_of(whole.split(1)[0])
    assert all(not (one & other) for step in zip(*dealt, strict=True) for one, other in itertools.combinations(step, 2))


def test_a_sequence_above_the_budget_is_named_and_an_episode_above_it_is_divided() -> None:
    long = trainable(0, [[9, 9], [9, 9]])
    assert long.num_tokens > 40 and len(packed([long])) == 1
    (part,) = batch([long], token_budget=40).split(1)
    assert sorted(part.micro_batches) == [(0,), (1,)]
    with pytest.raises(ConfigError, match=r"sample 'g:0' has \d+ tokens, more than the token budget of 20"):
        batch([long], token_budget=20).split(1)


def logprobs_of(path: Path, token_ids: Any, mask: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    with torch.no_grad():
        found = model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    return np.where(mask, np.concatenate([[0.0], found]), 0.0)


def test_a_reference_scores_every_sequence_of_an_episode(tmp_path: Path) -> None:
    path = make_policy(tmp_path / "policy", pad="<pad>")
    given = [episode(0, THREE, [0.0] * 5, vocabulary=WORDS), episode(1, [[2]], [0.0], vocabulary=WORDS)]
    record = run_node(EpisodeReference(Policy(str(path)), token_budget=64), {"rollouts": given}, timeout_s=60)
    for one in record.sent("referenced"):
        assert isinstance(one, Episode) and one.ref_logprobs.size == one.num_tokens == one.whole_mask.size
        expected = [logprobs_of(path, s.token_ids, s.policy_mask) for s in given[one.member].sequences]
        np.testing.assert_allclose(one.ref_logprobs, np.concatenate(expected), atol=1e-4)
    assert len(record.sent("referenced")) == 2


def test_the_kl_of_an_episode_is_that_of_all_its_sequences() -> None:
    one = episode(0, THREE, [1.0] * 5)
    behavior = np.concatenate([s.behavior_logprobs for s in one.sequences])
    compared = replace(one, ref_logprobs=np.where(one.whole_mask, behavior - 0.25, 0.0).astype(np.float32))
    (made,) = Estimate("reinforce", kl_coef=2.0).make_trainables([compared])
    num = one.response_tokens
    assert num == 12 and made.advantages[one.whole_mask][0] == pytest.approx(5.0 - 2.0 * 0.25 * num, abs=1e-4)
    rows, _, _ = split_in_rows(batch([made]), loss_masks([made], -1, 0))
    assert [row.ref_logprobs.size for row in rows.samples] == [s.token_ids.size for s in one.sequences]
    np.testing.assert_array_equal(np.concatenate([row.ref_logprobs for row in rows.samples]), compared.ref_logprobs)


def test_rows_of_a_sample_count_once_and_share_its_mean() -> None:
    made, mate = trainable(0, THREE), trainable(1, [[2]])
    samples = [made, mate]
    rows, masks, shares = split_in_rows(batch(samples), loss_masks(samples, -1, 0))
    values = torch.arange(4 * 6, dtype=torch.float32).view(4, 6)
    found = torch.zeros(())
    counts = np.zeros(4, int)
    for order in ([2, 3], [0], [1]):  # in several micro-batches
        piece = make_micro_batch(
            [rows.samples[i] for i in order],
            [masks[i] for i in order],
            PolicyObjective(),
            version=0,
            layout="padded",
            device=torch.device("cpu"),
            shares=[shares[i] for i in order],
        )
        counts += np.array(piece.added_counts)
        shown = values[order][:, : piece.mask_BT.shape[1]]
        found = found + aggregate_terms(
            shown, piece.mask_BT, "sequence", num_sequences=2, sample_tokens_B=piece.sample_tokens_B
        )
    assert counts.tolist()[:2] == [14, 2]
    lines = [values[0, :5], values[1, :1], values[2, :6]]
    assert float(found) == pytest.approx(float((torch.cat(lines).mean() + values[3, :2].mean()) / 2))


def test_a_sample_whose_first_sequence_is_too_old_counts_at_the_next() -> None:
    made = trainable(0, [[2], [3]])
    mask = made.whole_mask.copy()
    mask[: made.token_ids.size] = False
    _, _, shares = split_in_rows(batch([made]), [mask])
    assert [(s.sample_tokens, s.counts) for s in shares if s] == [(3, False), (3, True)]


def test_a_use_covers_all_sequences() -> None:
    made = trainable(0, THREE, version=5)
    spans = policy_spans(made)
    assert [span.tokens for span in spans] == [2, 3, 1, 4, 2]
    of_last = made.branches[-1]
    end = spans[-1].start + 2
    arrays = (of_last.token_ids, of_last.behavior_logprobs, of_last.versions)
    assert spans[-1].digest == request_digest(arrays[0][: end - 2], *(a[end - 2 : end] for a in arrays))
    mask = made.whole_mask & (5 - made.whole_versions <= 1)
    use = Use.of(made, mask)
    assert (use.tokens, use.stale_tokens, use.masked_tokens) == (int(mask.sum()), 12 - int(mask.sum()), 0)
    assert use.spans == tuple(spans) and use.oldest_version == (
        int(made.whole_versions[mask].min()) if mask.any() else None
    )
    half = replace(made, loss_mask=made.whole_mask & (np.arange(made.num_tokens) < made.token_ids.size))
    assert (Use.of(half).tokens, Use.of(half).masked_tokens) == (5, 7)
    stats = BatchStats.collect_stats([made], [mask], 5)
    assert (stats.num_samples, stats.response_tokens, stats.trained_tokens) == (1, 12, use.tokens)
    assert stats.stale_tokens == use.stale_tokens


def test_lengths_of_what_trained_are_counted_once_an_episode() -> None:
    """Policy tokens of all sequences; an episode without a token in the loss has not trained."""
    made = [trainable(0, THREE), trainable(1, [[9, 8]]), trainable(2, [[40]])]
    masks = [made[0].whole_mask, made[1].whole_mask, made[2].whole_mask & False]
    found = BatchStats.collect_stats(made, masks, 0).make_metrics()
    assert {name: found[name] for name in found if name.startswith("lengths")} == {
        "lengths_trained/tokens_1_16": 1,
        "lengths_trained/tokens_17_32": 1,
    }
    one_turn = BatchStats.collect_stats(made[2:], [made[2].whole_mask], 0).make_metrics()
    assert not [name for name in one_turn if name.startswith("lengths")]


@pytest.mark.parametrize(("tokens", "name"), [(1, "1_16"), (16, "1_16"), (17, "17_32"), (32, "17_32"), (33, "33_64")])
def test_a_range_of_lengths_ends_at_the_double_of_the_one_before(tokens: int, name: str) -> None:
    assert length_name(tokens) == f"tokens_{name}"


def test_the_batcher_counts_an_episode_once_and_says_what_repeats() -> None:
    samples = (trainable(0, THREE), trainable(1, [[2]]))
    groups = [Group("g", samples, 2)]
    (made,) = run_node(TokenBatch(1, whiten="full"), {"groups": groups}).sent("batches")
    assert (made.num_sequences, made.num_tokens) == (2, 14)
    trained = np.concatenate([s.advantages[trained_mask(s)] for s in made.samples])
    assert (trained.mean(), trained.std()) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-5))
    shared = repeated_tokens(samples[0])
    first, second, third = (one.token_ids for one in samples[0].sequences)
    assert shared >= len(first) // 2 + len(second) // 2 and shared < len(second) + len(third)
    assert made.metrics["repeated_tokens_share"] == pytest.approx(
        shared / (samples[0].num_tokens + samples[1].num_tokens)
    )
    assert made.metrics["sequences_per_sample"] == 2.0
    assert branch_metrics([samples[1]]) == {}


def test_what_takes_one_sequence_says_so() -> None:
    made = trainable(0, THREE)
    text = r"sample 'g:0' has 3 sequences, .* takes samples of one; set history='append'"
    with pytest.raises(ConfigError, match=text):
        value_question([Group("g", (made,), 1)])
    with pytest.raises(ConfigError, match=text):
        PairMaker(size=2).choose_pair([made, trainable(1, [[1]])])
    require_one_sequence([trainable(1, [[1]])], "a critic")
    require_advantages([made])


def test_the_best_of_a_group_trains_all_its_sequences() -> None:
    best: Episode = episode(0, THREE, [1.0] * 5)
    (sample,) = BestOfN(size=1).make_group(members([best], size=1), best).samples
    np.testing.assert_array_equal(sample.advantages, best.whole_mask.astype(np.float32))

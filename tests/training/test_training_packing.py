"""Splitting a batch into ranks, optimizer steps and micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import ConfigError
from flowrl.messages import Batch, Mismatched, Trainable
from flowrl.messages.forest import num_unique
from flowrl.messages.packing import ByTree


def sample(index: int, length: int) -> Trainable:
    mask = np.arange(length) >= 1
    return Trainable(
        sample_id=f"s{index}",
        group_id=f"g{index // 2}",
        prompt_id="p",
        epoch=0,
        member=index % 2,
        group_size=2,
        prompt_text="",
        response_text="",
        token_ids=np.arange(length, dtype=np.int32),
        policy_mask=mask,
        behavior_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        prompt_tokens=1,
        truncated=False,
        generator="generator/0",
        advantages=mask.astype(np.float32),
    )


def batch(lengths: list[int], **fields: int) -> Batch:
    samples = tuple(sample(i, length) for i, length in enumerate(lengths))
    tokens = sum(length - 1 for length in lengths)
    return Batch(samples, (), num_sequences=len(lengths), num_tokens=tokens, num_groups=1, **fields)


def paired(whole: Batch) -> Batch:
    """The same batch with two in three neighbours made pairs."""
    samples = tuple(
        replace(s, pair="" if i % 6 > 3 else f"p{i // 2}", label=1 - 2 * (i % 2)) for i, s in enumerate(whole.samples)
    )
    return replace(whole, samples=samples)


def steps_of(part: Batch) -> list[set[str]]:
    """Sample ids of each optimizer step of one rank."""
    starts = (0, *part.step_ends[:-1])
    return [
        {part.samples[i].sample_id for micro in part.micro_batches[start:end] for i in micro}
        for start, end in zip(starts, part.step_ends, strict=True)
    ]


@given(
    lengths=st.lists(st.integers(2, 64), min_size=1, max_size=40),
    ranks=st.integers(1, 5),
    budget=st.sampled_from([0, 64, 100, 1000]),
    steps=st.integers(1, 4),
)
def test_split_keeps_every_invariant(lengths: list[int], ranks: int, budget: int, steps: int) -> None:
    whole = batch(lengths, token_budget=budget, optimizer_steps=steps)
    parts = whole.split(ranks)
    indices = [i for part in parts for micro in part.micro_batches for i in micro]
    ids = [part.samples[i].sample_id for part in parts for micro in part.micro_batches for i in micro]
    assert sorted(ids) == sorted(s.sample_id for s in whole.samples)
    assert len(indices) == sum(len(part.samples) for part in parts)
    assert {(part.step_ends, len(part.micro_batches)) for part in parts} == {
        (parts[0].step_ends, parts[0].step_ends[-1])
    }
    assert len(parts[0].step_ends) == steps
    alone = steps_of(whole.split(1)[0])
    assert [set.union(*step) for step in zip(*map(steps_of, parts), strict=True)] == alone
    for part in parts:
        assert (part.num_sequences, part.num_tokens) == (whole.num_sequences, whole.num_tokens)
        for micro in filter(None, part.micro_batches):
            longest = max(part.samples[i].token_ids.size for i in micro)
            assert not budget or len(micro) * longest <= budget


@given(lengths=st.lists(st.integers(2, 64), min_size=1, max_size=40), ranks=st.integers(1, 5))
def test_ranks_differ_by_less_than_the_longest_sample(lengths: list[int], ranks: int) -> None:
    loads = [sum(s.token_ids.size for s in part.samples) for part in batch(lengths).split(ranks)]
    assert max(loads) - min(loads) <= max(lengths)


@given(
    lengths=st.lists(st.integers(2, 64), min_size=2, max_size=40).filter(lambda lengths: len(lengths) % 2 == 0),
    ranks=st.integers(1, 5),
    budget=st.sampled_from([0, 128, 150, 1000]),
    steps=st.integers(1, 4),
)
def test_split_keeps_pairs_together_in_their_order(lengths: list[int], ranks: int, budget: int, steps: int) -> None:
    whole = paired(batch(lengths, token_budget=budget, optimizer_steps=steps))
    parts = whole.split(ranks)
    assert sorted(s.sample_id for part in parts for s in part.samples) == sorted(s.sample_id for s in whole.samples)
    alone = steps_of(whole.split(1)[0])
    assert [set.union(*step) for step in zip(*map(steps_of, parts), strict=True)] == alone
    for part in parts:
        for micro in filter(None, part.micro_batches):
            assert not budget or len(micro) * max(part.samples[i].token_ids.size for i in micro) <= budget
            found = [part.samples[i] for i in micro if part.samples[i].pair]
            for first, second in zip(found[::2], found[1::2], strict=True):
                assert (first.pair, first.label, second.label) == (second.pair, 1, -1)


# Trees


def grouped(sizes: list[tuple[int, int, int]], seed: int, **fields: Any) -> Batch:
    """Groups of (samples, tokens of the prompt, most tokens of a response)."""
    draw = np.random.default_rng(seed)
    samples = []
    for members, prompt, response in sizes:
        start = draw.integers(0, 3, prompt)
        for _ in range(members):
            ids = np.concatenate([start, draw.integers(0, 3, draw.integers(1, response + 1))]).astype(np.int32)
            samples.append(replace(sample(len(samples), len(ids)), token_ids=ids))
    tokens = sum(s.response_tokens for s in samples)
    return Batch(tuple(samples), (), num_sequences=len(samples), num_tokens=tokens, num_groups=len(sizes), **fields)


GROUPS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8)


@given(
    sizes=GROUPS,
    seed=st.integers(0, 1000),
    ranks=st.integers(1, 4),
    budget=st.sampled_from([0, 100, 200]),
    steps=st.integers(1, 3),
    pairs=st.booleans(),
)
def test_split_of_trees_keeps_every_invariant(
    sizes: list[tuple[int, int, int]], seed: int, ranks: int, budget: int, steps: int, pairs: bool
) -> None:
    whole = grouped(sizes, seed, token_budget=budget, optimizer_steps=steps, layout="tree")
    if pairs and len(whole.samples) % 2 == 0:
        whole = paired(whole)
    parts = whole.split(ranks)
    ids = [part.samples[i].sample_id for part in parts for micro in part.micro_batches for i in micro]
    assert sorted(ids) == sorted(s.sample_id for s in whole.samples)
    assert {part.layout for part in parts} == {"tree"}
    assert {(part.step_ends, len(part.micro_batches)) for part in parts} == {
        (parts[0].step_ends, parts[0].step_ends[-1])
    }
    rows = replace(whole, layout="rows", token_budget=0).split(1)[0]
    assert [set.union(*step) for step in zip(*map(steps_of, parts), strict=True)] == steps_of(rows)
    for part in parts:
        for micro in filter(None, part.micro_batches):
            assert not budget or num_unique([part.samples[i].token_ids for i in micro]) <= budget
            found = [part.samples[i] for i in micro if part.samples[i].pair]
            for first, second in zip(found[::2], found[1::2], strict=True):
                assert (first.pair, first.label, second.label) == (second.pair, 1, -1)


@given(sizes=GROUPS, seed=st.integers(0, 1000), ranks=st.integers(1, 4), budget=st.sampled_from([0, 60, 200]))
def test_single_sequences_are_split_as_pairs_would_be(
    sizes: list[tuple[int, int, int]], seed: int, ranks: int, budget: int
) -> None:
    """What neighbours share, counted once, gives the ranges that a forest of each range gives."""
    whole = grouped(sizes, seed, token_budget=budget, layout="tree")
    parts = whole.split(ranks)
    with mock.patch.object(ByTree, "_are_single", lambda self, units: False):
        assert [(p.samples, p.micro_batches) for p in whole.split(ranks)] == [
            (p.samples, p.micro_batches) for p in parts
        ]


@given(sizes=GROUPS, seed=st.integers(0, 1000), ranks=st.integers(2, 4))
def test_no_rank_has_much_more_than_its_share_of_a_forest(
    sizes: list[tuple[int, int, int]], seed: int, ranks: int
) -> None:
    whole = grouped(sizes, seed, layout="tree")
    loads = [num_unique([s.token_ids for s in part.samples]) for part in whole.split(ranks)]
    fair = -(-num_unique([s.token_ids for s in whole.samples]) // ranks)
    assert max(loads) <= fair + 2 * max(s.token_ids.size for s in whole.samples)


def test_a_group_fills_a_micro_batch_of_unique_tokens() -> None:
    whole = grouped([(8, 40, 1)] * 2, 0, token_budget=96, layout="tree")
    (part,) = whole.split(1)
    assert [len({part.samples[i].group_id for i in micro}) for micro in part.micro_batches] == [8]
    assert len(replace(whole, layout="rows").split(1)[0].micro_batches) == 8


def test_auto_packs_rows_unless_something_is_shared() -> None:
    shared, apart = grouped([(4, 20, 3)], 0, layout="auto"), grouped([(1, 20, 3)] * 4, 0, layout="auto")
    assert [whole.split(1)[0].layout for whole in (shared, apart)] == ["tree", "rows"]
    assert apart.split(1)[0].micro_batches == replace(apart, layout="rows").split(1)[0].micro_batches


def test_the_pass_over_mismatched_completions_is_within_the_budget_too() -> None:
    whole = grouped([(4, 30, 1)], 0, token_budget=100, layout="tree")
    others = [Mismatched(np.full(60, 5 + n, np.int32), np.ones(60, np.bool_)) for n in range(4)]
    samples = tuple(replace(s, mismatched=other) for s, other in zip(whole.samples, others, strict=True))
    (part,) = replace(whole, samples=samples).split(1)
    assert [len(micro) for micro in part.micro_batches] == [1, 1, 1, 1]


def test_a_pair_above_the_budget_is_named() -> None:
    with pytest.raises(ConfigError, match=r"pair 'p0' needs 80 tokens, padding included, .* to at least 80"):
        paired(batch([40, 30], token_budget=64)).split(2)


def test_known_split() -> None:
    first, second = batch([9, 5, 4, 2], token_budget=9).split(2)
    assert [s.sample_id for s in first.samples] == ["s0", "s3"]
    assert [s.sample_id for s in second.samples] == ["s1", "s2"]
    assert first.micro_batches == second.micro_batches == ((0,), (1,))


def test_a_rank_without_samples_gets_empty_micro_batches() -> None:
    parts = batch([8], token_budget=8).split(3)
    assert [part.micro_batches for part in parts] == [((0,),), ((),), ((),)]


def test_a_sample_above_the_budget_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'s1' has 70 tokens, more than the token budget of 64"):
        batch([10, 70], token_budget=64).split(2)

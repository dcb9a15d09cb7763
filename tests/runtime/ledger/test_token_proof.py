"""The proof that the trained tokens are the sampled ones: digests, and runs in which a node changes a sample."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import FlowrlError
from flowrl.messages import Sample
from flowrl.messages.episode import Episode
from flowrl.runtime.ledger.ledger_client import Use
from flowrl.runtime.ledger.token_digest import policy_spans, request_digest
from flowrl.testing import run_graph
from tests.runtime.ledger.made_episodes import episode
from tests.runtime.ledger.small_run import prompts

CHANGED = Path(__file__).parent / "graphs_proof" / "changed.py"


# Digests

lengths = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=6)
"""Of each span: tokens before it since the last one, and its own."""


def sequence(runs: list[tuple[int, int]], seed: int, tail: int = 0) -> Episode:
    """Random tokens with policy spans of these lengths; spans that touch are one."""
    mask = [policy for said, replied in runs for policy in [False] * said + [True] * replied] + [False] * tail
    rng, made = np.random.default_rng(seed), episode(prompts(0)[0], [[0]])
    return replace(
        made,
        token_ids=rng.integers(0, 2**31, len(mask), dtype=np.int32),
        policy_mask=np.array(mask, np.bool_),
        behavior_logprobs=rng.normal(size=len(mask)).astype(np.float32),
        versions=rng.integers(0, 9, len(mask), dtype=np.int32),
    )


def spelt_out(sample: Sample, start: int, tokens: int) -> str:
    """The digest from its definition, without the shared state."""
    part = slice(start, start + tokens)
    ids = b"".join(struct.pack("<i", value) for value in sample.token_ids[: start + tokens])
    logprobs = b"".join(struct.pack("<f", value) for value in sample.behavior_logprobs[part])
    versions = b"".join(struct.pack("<i", value) for value in sample.versions[part])
    return blake2b(ids + logprobs + versions + struct.pack("<qq", start, tokens), digest_size=16).hexdigest()


@given(lengths, st.integers(0, 999), st.integers(0, 3))
def test_the_digests_of_a_sequence_are_those_of_its_requests(runs: list[tuple[int, int]], seed: int, tail: int) -> None:
    sample = sequence(runs, seed, tail)
    spans = policy_spans(sample)
    covered = np.zeros_like(sample.policy_mask)
    for start, tokens, digest in spans:
        part = slice(start, start + tokens)
        covered[part] = True
        arrays = (sample.token_ids[part], sample.behavior_logprobs[part], sample.versions[part])
        assert digest == request_digest(sample.token_ids[:start], *arrays) == spelt_out(sample, start, tokens)
    assert np.array_equal(covered, sample.policy_mask)
    assert all(one.start + one.tokens < two.start for one, two in itertools.pairwise(spans))


@given(lengths.filter(len), st.integers(0, 999), st.data())
def test_any_change_changes_the_digest_of_every_span_that_it_reaches(
    runs: list[tuple[int, int]], seed: int, data: st.DataObject
) -> None:
    sample = sequence(runs, seed)
    name = data.draw(st.sampled_from(["token_ids", "behavior_logprobs", "versions"]))
    place = data.draw(st.integers(0, len(sample.token_ids) - 1))
    array = getattr(sample, name).copy()
    array[place] = np.nextafter(array[place], np.float32(99)) if name == "behavior_logprobs" else array[place] ^ 1
    before, after = policy_spans(sample), policy_spans(replace(sample, **{name: array}))
    for old, new in zip(before, after, strict=True):
        inside = old.start <= place < old.start + old.tokens
        reached = inside or (name == "token_ids" and place < old.start)
        assert (old.digest != new.digest) == reached


@given(lengths, st.integers(0, 999))
def test_the_type_and_layout_of_an_array_do_not_matter(runs: list[tuple[int, int]], seed: int) -> None:
    sample = sequence(runs, seed)
    wide = replace(
        sample,
        token_ids=np.repeat(sample.token_ids.astype(np.int64), 2)[::2],
        behavior_logprobs=sample.behavior_logprobs.astype(">f8"),
        versions=sample.versions.astype(np.int16),
        policy_mask=sample.policy_mask.astype(np.uint8),
    )
    assert policy_spans(wide) == policy_spans(sample)


def test_an_id_beyond_32_bits_is_refused() -> None:
    sample = sequence([(1, 2)], 0)
    with pytest.raises(FlowrlError, match="integers of 32 bits, but an array of int64 has a value that is not"):
        policy_spans(replace(sample, token_ids=sample.token_ids.astype(np.int64) + 2**32))


def test_a_use_has_every_span_whatever_the_loss_leaves_out() -> None:
    sample = sequence([(2, 3), (1, 2)], 0)
    assert (
        Use.of(sample, np.zeros_like(sample.policy_mask)).spans == Use.of(sample).spans == tuple(policy_spans(sample))
    )
    assert [span[:2] for span in policy_spans(sample)] == [(2, 3), (6, 2)]


# Runs


@pytest.mark.parametrize(
    ("change", "fed"),
    [
        ("id", "8 tokens of sample group2:1 after its first 8 "),
        ("id of the prompt", "8 tokens of sample group2:1 after its first 8 "),
        ("logprob", "8 tokens of sample group2:1 after its first 8 "),
        ("version", "8 tokens of sample group2:1 after its first 8 "),
        ("mask", "8 tokens of sample group2:1 after its first 7 "),
    ],
)
def test_a_node_that_changes_a_sample_fails_the_audit_which_names_it(tmp_path: Path, change: str, fed: str) -> None:
    ran = run_graph(CHANGED, tmp_path / "run", {"change": change}, steps=3)
    report = ran.audit()
    assert [v.text.partition("at step")[0] for v in report.violations if v.kind == "spans"] == [
        f"trainer was fed {fed}"
    ]
    assert "a node has changed ids, policy mask, logprobs or versions" in str(report)
    assert {v.kind for v in report.violations} >= {"spans", "requests"}
    assert all("group2:1" in v.text for v in report.violations)
    assert report.figures["policy spans"] == 12 and report.figures["policy spans proven"] == 11


@pytest.mark.parametrize("change", ["nothing", "metrics", "wider types"])
def test_a_node_that_leaves_the_tokens_alone_passes(tmp_path: Path, change: str) -> None:
    ran = run_graph(CHANGED, tmp_path / "run", {"change": change}, steps=3)
    report = ran.audit()
    assert report.ok, str(report)
    assert report.figures["policy spans"] == report.figures["policy spans proven"] == 12

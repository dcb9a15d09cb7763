"""The forest of sequences: each shared prefix once, and who sees whom."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.messages.forest import Forest, Stem, make_forest, num_shared, num_unique, order_key

SEQUENCES = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 300]), min_size=1, max_size=7).map(lambda ids: np.array(ids, np.int32)),
    min_size=1,
    max_size=12,
)


def prefixes_of(sequences: list[np.ndarray]) -> set[tuple[int, ...]]:
    return {tuple(tokens[: n + 1].tolist()) for tokens in sequences for n in range(len(tokens))}


@given(SEQUENCES)
def test_every_prefix_stands_once(sequences: list[np.ndarray]) -> None:
    forest = make_forest(sequences)
    assert len(forest) == len(prefixes_of(sequences)) == num_unique(sequences)
    for tokens, places in zip(sequences, forest.places, strict=True):
        assert forest.token_ids[places].tolist() == tokens.tolist()
        assert forest.positions[places].tolist() == list(range(len(tokens)))
    for tokens, places in zip(sequences, forest.places, strict=True):
        for other, there in zip(sequences, forest.places, strict=True):
            agree = num_shared(tokens, other)
            assert places[:agree].tolist() == there[:agree].tolist()
            assert not set(places[agree:]) & set(there[agree:])


@given(SEQUENCES)
def test_a_place_sees_its_ancestors_and_nothing_else(sequences: list[np.ndarray]) -> None:
    forest = make_forest(sequences)
    seen = {(int(t), int(s)) for places in forest.places for n, t in enumerate(places) for s in places[: n + 1]}
    size = range(len(forest))
    assert seen == {(t, s) for t in size for s in size if s <= t < forest.ends[s]}


@given(SEQUENCES)
def test_segments_hold_every_place_once_with_one_continuation(sequences: list[np.ndarray]) -> None:
    forest = make_forest(sequences)
    stems = forest.stems()
    assert [t for one in stems for t in range(one.start, one.stop)] == list(range(len(forest)))
    for one in stems:
        assert {int(end) for end in forest.ends[one.start : one.stop]} == {one.end}
        above = [other for other in stems if other.start < one.start < other.end]
        assert one.depth == len(above)
        assert sum(other.stop - other.start for other in above) == forest.positions[one.start]


@given(SEQUENCES, st.randoms(use_true_random=False))
def test_the_order_of_the_sequences_changes_no_place(sequences: list[np.ndarray], random: object) -> None:
    shuffled = list(range(len(sequences)))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = make_forest(sequences), make_forest([sequences[i] for i in shuffled])
    assert one.token_ids.tolist() == other.token_ids.tolist() and one.ends.tolist() == other.ends.tolist()
    assert [one.places[i].tolist() for i in shuffled] == [places.tolist() for places in other.places]


def test_known_forest() -> None:
    forest = make_forest([np.array(ids, np.int32) for ids in ([5, 6, 8], [5, 6, 7, 9], [4], [5, 6])])
    assert forest.token_ids.tolist() == [4, 5, 6, 7, 9, 8]
    assert forest.positions.tolist() == [0, 0, 1, 2, 3, 2]
    assert forest.ends.tolist() == [1, 6, 6, 5, 5, 6]
    assert forest.stems() == (Stem(0, 1, 1, 0), Stem(1, 3, 6, 0), Stem(3, 5, 5, 1), Stem(5, 6, 6, 1))


def test_no_sequences_are_an_empty_forest() -> None:
    forest = make_forest([])
    assert isinstance(forest, Forest) and len(forest) == 0 and forest.stems() == ()


@pytest.mark.parametrize(("one", "other"), [([1], [1, 0]), ([255], [256]), ([2, 9], [3])])
def test_keys_sort_like_the_tokens(one: list[int], other: list[int]) -> None:
    assert order_key(np.array(one, np.int32)) < order_key(np.array(other, np.int32))

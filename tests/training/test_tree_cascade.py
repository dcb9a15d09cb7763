"""A cascade over deep and uneven trees: what it holds is bounded for a token, and results are those of one mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.messages.forest import make_forest
from flowrl.training.model import tree_attention
from flowrl.training.model.tree_attention import Cascade, TreeAttention
from tests.training.test_trees import CPU, Tokens, assert_exact, attended, drawn

FACTORS = {True: torch.bfloat16, False: torch.float32}
"""Dtype of the factors of products of a model in bfloat16, on a CPU that multiplies fast in it or not."""


class Fresh:
    """Tokens that no other sequence has."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, size: int) -> np.ndarray:
        self.num += size
        return np.arange(self.num - size, self.num, dtype=np.int32)


def three_levels(prefix: int, leaf: int) -> Tokens:
    """Two stems behind one, and two leaves behind each: what the last two follow is not one range of places."""
    fresh = Fresh()
    root = fresh(prefix)
    return [np.concatenate((root, stem, fresh(leaf))) for stem in (fresh(prefix), fresh(prefix)) for _ in range(2)]


def caterpillar(turns: int, *, shared: int, stem: int, branch: int) -> Tokens:
    """A branch at every turn, which stands before what goes on."""
    fresh = Fresh()
    trunk, found = fresh(shared), []
    for _ in range(turns):
        found.append(np.concatenate((trunk, fresh(branch))))
        trunk = np.concatenate((trunk, fresh(stem)))
    return [*found, trunk]


def uneven(prefix: int, longest: int, short: int) -> Tokens:
    """One long response and seven short ones to the same prefix."""
    fresh = Fresh()
    root = fresh(prefix)
    return [np.concatenate((root, fresh(size))) for size in [longest, *[short] * 7]]


def among_short(prefix: int, longest: int, short: int) -> Tokens:
    """Long leaves whose prefixes, which are not one range, are repeated: most leaves beside them are short."""
    fresh = Fresh()
    root = fresh(prefix)
    found = [np.concatenate((root, fresh(short)))]
    for stem in (fresh(prefix), fresh(prefix)):
        found += [np.concatenate((root, stem, fresh(size))) for size in [*[short] * 12, longest]]
    return found


def held_bytes(root: object) -> int:
    """Bytes of the tensors and arrays that can be reached from `root`, each of them once."""
    sizes: dict[int, int] = {}
    seen: dict[int, object] = {}
    todo = [root]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, np.ndarray):
            whole = one if one.base is None else one.base
            seen[id(whole)], sizes[id(whole)] = whole, whole.nbytes
        else:
            todo += members(one)
    return sum(sizes.values())


def members(one: object) -> Iterable[object]:
    if isinstance(one, dict):
        return one.values()
    return one if isinstance(one, list | tuple) else getattr(one, "__dict__", {}).values()


def held_a_token(sequences: Tokens) -> float:
    """Bytes that a cascade holds for a token, of a model of nine heads with three heads of keys."""
    forest = make_forest(sequences)
    made = Cascade(forest, CPU)
    made.make_chunks(9, 3)
    return held_bytes(made) / len(forest)


@pytest.mark.parametrize("prefix", [0, 3000])
def test_what_a_cascade_holds_grows_with_the_tokens_alone(prefix: int) -> None:
    """Neither masks nor places for every chunk of a long stem: those would grow with its square."""

    def held(size: int) -> float:
        sequences = [np.arange(size, dtype=np.int32), np.arange(size, dtype=np.int32)]
        sequences[1][prefix:] += size
        return held_a_token(sequences)

    assert held(16000) < 1.1 * held(8000) < 150


def test_what_a_cascade_holds_of_a_prefix_that_is_repeated_is_bounded() -> None:
    """Of stems as long as may have it among their own keys: a place for each head and key."""
    prefix, own = 4 * tree_attention.LONG, tree_attention.LONG
    sequences = [np.concatenate((np.arange(prefix), prefix + own * n + np.arange(own))) for n in range(8)]
    sequences = [sequence.astype(np.int32) for sequence in sequences]
    assert not Cascade(make_forest(sequences), CPU).behind
    assert held_a_token(sequences) < 300


@pytest.mark.parametrize(
    ("sequences", "most"),
    [
        (three_levels(3000, 8000), 100),
        (caterpillar(200, shared=50, stem=1, branch=1), 600),
        (caterpillar(200, shared=50, stem=100, branch=1), 600),
        (uneven(8000, 16000, 200), 150),
        (among_short(500, 16000, 250), 150),
    ],
    ids=["three levels", "a branch at every token", "short branches", "one long response", "long among short"],
)
def test_what_a_cascade_holds_for_a_token_is_bounded_however_many_stand_before_it(
    sequences: Tokens, most: float
) -> None:
    assert held_a_token(sequences) < most


@pytest.mark.parametrize("turns", [400, 1600])
def test_what_a_cascade_holds_for_a_turn_does_not_grow_with_their_number(turns: int) -> None:
    assert held_a_token(caterpillar(turns, shared=50, stem=1, branch=1)) < 600


@pytest.mark.parametrize(
    ("groups", "prompt", "response", "own", "behind"),
    [
        (8, 40, 24, [(24, 64)] * 64 + [(40, 40)] * 8, []),
        (1, 1000, 16, [(1000, 1000)] + [(16, 16)] * 16, [(256, 1000)]),
        (1, 200, 200, [(200, 400)] * 8 + [(200, 200)], []),
    ],
)
def test_a_prompt_is_repeated_for_each_response_up_to_four_times_as_long(
    groups: int, prompt: int, response: int, own: list[tuple[int, int]], behind: list[tuple[int, int]]
) -> None:
    """(queries, keys) of the blocks of equal groups."""
    fresh, sequences = Fresh(), []
    for _ in range(groups):
        root = fresh(prompt)
        num_responses = (len(own) - groups) // groups
        sequences += [np.concatenate((root, fresh(response))) for _ in range(num_responses)]
    made = Cascade(make_forest(sequences), CPU)
    assert sorted(block.shape for part in made.own for block in part) == sorted(own)
    assert [block.shape for part in made.behind for block in part] == behind


SMALL: dict[str, Callable[[], Tokens]] = {
    "three levels": lambda: three_levels(60, 40),
    "a branch at every token": lambda: caterpillar(60, shared=10, stem=1, branch=1),
    "long branches": lambda: caterpillar(12, shared=10, stem=1, branch=30),
    "short branches": lambda: caterpillar(12, shared=10, stem=30, branch=1),
    "one long response": lambda: uneven(60, 120, 9),
    "long among short": lambda: among_short(30, 90, 15),
}


@pytest.fixture(params=list(SMALL))
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tokens:
    """A tree of some hundred tokens with stems that are long, in chunks that cut their blocks."""
    monkeypatch.setattr(tree_attention, "LONG", 20)
    monkeypatch.setattr(tree_attention, "SCORES_A_CHUNK", 4000)
    return SMALL[request.param]()


@pytest.mark.parametrize("value_channels", [8, 12, 4])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_a_cascade_is_exact_for_deep_trees_and_any_heads(small: Tokens, key_heads: int, value_channels: int) -> None:
    assert_exact(make_forest(small), "cascade", key_heads, value_channels)


@pytest.mark.parametrize("is_fast", [True, False], ids=["factors in bfloat16", "factors in float32"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_a_cascade_in_bfloat16_differs_by_rounding(
    small: Tokens, key_heads: int, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "_is_fast_in_bfloat16", lambda: is_fast)
    forest = make_forest(small)
    tensors = drawn(len(forest), torch.bfloat16, key_heads)
    assert tree_attention._factor_dtype(tensors[0]) == FACTORS[is_fast]
    exact = attended(TreeAttention(forest, CPU, "dense"), tuple(tensor.double() for tensor in tensors))
    for ours, theirs in zip(attended(TreeAttention(forest, CPU, "cascade"), tensors), exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=0.02 * float(theirs.abs().max()))

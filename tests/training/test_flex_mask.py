"""The block mask of flex attention: equal to torch's own, and made without a tensor of places times places."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.profiler import ProfilerActivity, profile

from flowrl.messages.forest import make_forest
from flowrl.training.model import tree_attention
from flowrl.training.model.tree_attention import TreeAttention

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
HEADS, KEY_HEADS, CHANNELS = 4, 2, 8
Shape = tuple[int, Sequence[Any]]
"""Tokens of a stem, and the stems that continue it."""

LENGTHS = st.sampled_from([1, 5, 100, 127, 128, 129, 256, 300])
STEMS: st.SearchStrategy[Shape] = st.recursive(
    st.tuples(LENGTHS, st.just(())),
    lambda below: st.tuples(LENGTHS, st.lists(below, min_size=2, max_size=3)),
    max_leaves=5,
)
FORESTS: dict[str, list[Shape]] = {
    "one place": [(1, ())],
    "less than a block": [(40, [(30, ()), (20, ())])],
    "a block": [(100, [(20, ()), (8, ())])],
    "one place more": [(100, [(20, ()), (9, ())])],
    "whole blocks": [(256, [(128, ()), (128, ())])],
    "several roots": [(200, ()), (128, ()), (56, [(1, ())] * 5), (300, ())],
    "full but for a place": [(255, ()), (129, ())],
    "nested": [(130, [(200, [(90, [(70, ()), (5, ())]), (300, ())]), (257, ()), (1, ())])],
    "a long prefix": [(1000, [(20, ())] * 20 + [(200, [(60, ())] * 3)])],
    "roots of one place": [(1, ())] * 300,
}


def tree(shapes: Sequence[Shape], kernel: Any = "flex") -> TreeAttention:
    """The forest of these roots, in which no two tokens are alike."""
    tokens = count()

    def leaves(shape: Shape, before: list[int]) -> Iterator[np.ndarray]:
        size, below = shape
        here = before + [next(tokens) for _ in range(size)]
        if not below:
            yield np.array(here, np.int32)
        for one in below:
            yield from leaves(one, here)

    return TreeAttention(make_forest([ids for root in shapes for ids in leaves(root, [])]), CPU, kernel)


def by_torch(ends_L: Tensor) -> BlockMask:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends_L[key])

    size = len(ends_L)
    return create_block_mask(sees, B=None, H=None, Q_LEN=size, KV_LEN=size, device=ends_L.device)


def assert_equals_that_of_torch(ends_L: Tensor) -> None:
    """Every field but the function: also the order of the blocks that are not seen, and the lists for backward."""
    *found, _ = tree_attention.make_block_mask(ends_L).as_tuple()
    *expected, _ = by_torch(ends_L).as_tuple()
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, check_stride=True)
        else:
            assert ours == theirs


@pytest.mark.parametrize("shapes", FORESTS.values(), ids=FORESTS)
def test_the_mask_equals_that_of_torch(shapes: list[Shape]) -> None:
    assert_equals_that_of_torch(tree(shapes).ends_L)


@settings(max_examples=60)
@given(shapes=st.lists(STEMS, min_size=1, max_size=3))
def test_the_mask_of_a_random_forest_equals_that_of_torch(shapes: list[Shape]) -> None:
    assert_equals_that_of_torch(tree(shapes).ends_L)


def test_blocks_of_a_prefix_are_full_and_those_of_a_sibling_empty() -> None:
    """By hand: a prefix of 2 blocks, a branch of 2, one of 1 and a half. Partial are the diagonal and the last row."""
    mask = tree_attention.make_block_mask(tree([(256, [(256, ()), (192, ())])]).ends_L)
    assert mask.shape == (1, 1, 704, 704)
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1, 1, 4]]]
    assert mask.kv_indices[0, 0, 4, 0] == 4 and mask.kv_indices[0, 0, 5, :4].tolist() == [0, 1, 4, 5]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3, 2, 0]]], "a block with padding is not full"
    assert mask.full_kv_indices[0, 0, 3, :3].tolist() == [0, 1, 2]
    assert mask.full_kv_indices[0, 0, 4, :2].tolist() == [0, 1]


def attended(shapes: list[Shape], kernel: str) -> Tensor:
    """Attention [1, L, heads, D] of drawn queries, keys and values."""
    forest = tree(shapes, kernel)
    generator = torch.Generator().manual_seed(0)
    drawn = (
        torch.randn(1, h, len(forest.forest), CHANNELS, generator=generator) for h in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS // KEY_HEADS  # type: ignore[assignment]
    with torch.no_grad():
        return forest(module, *drawn, CHANNELS**-0.5)


@pytest.mark.parametrize("shapes", FORESTS.values(), ids=FORESTS)
def test_attention_by_the_mask_equals_that_by_a_dense_one(shapes: list[Shape]) -> None:
    """Eager flex attention reads the mask's function and lengths, not its blocks."""
    torch.testing.assert_close(attended(shapes, "flex"), attended(shapes, "dense"), rtol=0, atol=5e-6)


@pytest.mark.slow
def test_attention_by_a_compiled_kernel_equals_that_by_a_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel for a CPU reads the blocks, as that for a GPU does."""
    compiled = torch.compile(flex_attention, dynamic=True)
    monkeypatch.setattr(tree_attention, "compile_flex", lambda device: compiled)
    for name in ("several roots", "nested", "a long prefix"):
        found, expected = (attended(FORESTS[name], kernel) for kernel in ("flex", "dense"))
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)


def peak_bytes(make: Callable[[Tensor], object], ends_L: Tensor, path: Path) -> int:
    """Most that torch holds at a time of what it allocates in `make`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        make(ends_L)
    recorded.export_chrome_trace(str(path))
    events = [one for one in json.loads(path.read_text())["traceEvents"] if one["name"] == "[memory]"]
    events.sort(key=lambda one: one["ts"])
    return int(np.cumsum([one["args"]["Bytes"] for one in events]).max())


def test_memory_grows_with_the_places_and_the_pairs_of_blocks(tmp_path: Path) -> None:
    """4 lists of blocks at 4 bytes a pair stay, and a sort takes no more than 24. torch's own mask holds at least a
    byte a pair of places, by the same measure."""
    ends_L = tree([(2000, [(762, ())] * 40 + [(288, ())])]).ends_L
    size, pairs = 32768, 256**2
    assert len(ends_L) == size
    begun = perf_counter()
    tree_attention.make_block_mask(ends_L)
    assert perf_counter() - begun < 3
    assert (
        16 * pairs
        <= peak_bytes(tree_attention.make_block_mask, ends_L, tmp_path / "ours.json")
        < 40 * pairs + 16 * size
    )
    short_L = ends_L[:2048].clamp(max=2048)
    assert peak_bytes(by_torch, short_L, tmp_path / "torch.json") > 2048**2

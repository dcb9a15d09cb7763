"""Micro-batches as trees: logprobs, entropies, values and gradients equal those of separate rows, by every kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flowrl.messages.forest import Forest, make_forest
from flowrl.training.layouts import DENSE_PLACES, Kernel, choose_kernel
from flowrl.training.model import tree_attention
from flowrl.training.model.policy_model import PolicyModel, load_policy_model
from flowrl.training.model.row_layout import RowLayout, lay_out, lay_out_ends, policy_places, tree_saves_places
from flowrl.training.model.tree_attention import BlockBatch, Cascade, TreeAttention
from flowrl.training.model.value_model import ScalarModel, load_scalar_model
from flowrl.training.settings import Dtype, LoRA
from tests.training.training_cases import VOCABULARY, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
KERNELS: tuple[Kernel, ...] = ("dense", "cascade", "flex")
HEADS, KEY_HEADS, CHANNELS = 4, 2, 8
FORESTS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=9).map(lambda ids: np.array(ids, np.int32)),
    min_size=1,
    max_size=8,
)
Tokens = list[np.ndarray]


def grouped(seed: int = 0, sizes: tuple[int, ...] = (3, 2, 4)) -> tuple[Tokens, list[np.ndarray]]:
    """Groups with a prompt each, uneven lengths, and a branch in a response; (tokens, policy masks)."""
    draw = np.random.default_rng(seed)
    tokens, masks = [], []
    for size in sizes:
        prompt = draw.integers(0, VOCABULARY, draw.integers(2, 20))
        for _ in range(size):
            tokens.append(np.concatenate([prompt, draw.integers(0, VOCABULARY, draw.integers(1, 15))]))
            masks.append(np.arange(len(tokens[-1])) >= len(prompt))
    tokens.append(np.concatenate([tokens[0][:-1], draw.integers(0, VOCABULARY, 4)]))  # goes on from a response
    tokens.append(tokens[1])  # the same response twice
    masks += [np.arange(len(tokens[-2])) >= len(tokens[0]) - 1, masks[1]]
    return [ids.astype(np.int32) for ids in tokens], masks


def attended(forest_kernel: TreeAttention, drawn: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients of one attention."""
    q, k, v = (tensor.detach().requires_grad_(forest_kernel.kernel != "flex") for tensor in drawn)
    module = nn.Module()
    module.num_key_value_groups = q.shape[1] // k.shape[1]  # type: ignore[assignment]
    out = forest_kernel(module, q, k, v, CHANNELS**-0.5)
    if forest_kernel.kernel == "flex":  # torch has no backward for it on a CPU
        return [out]
    weights = torch.arange(out.numel(), dtype=torch.float64).sin().view_as(out)
    (out * weights.to(out.dtype)).sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [out.detach(), q.grad, k.grad, v.grad]


def drawn(
    size: int, dtype: torch.dtype = torch.float32, key_heads: int = KEY_HEADS, value_channels: int = CHANNELS
) -> tuple[Tensor, ...]:
    """Queries, keys and values [1, heads, size, channels]."""
    generator = torch.Generator().manual_seed(size)
    shapes = ((HEADS, CHANNELS), (key_heads, CHANNELS), (key_heads, value_channels))
    return tuple((2 * torch.randn(1, h, size, d, generator=generator)).to(dtype) for h, d in shapes)


def assert_exact(forest: Forest, kernel: Kernel, key_heads: int = KEY_HEADS, value_channels: int = CHANNELS) -> None:
    """Compare with one mask over the forest, in twice the precision."""
    tensors = drawn(len(forest), key_heads=key_heads, value_channels=value_channels)
    found = attended(TreeAttention(forest, CPU, kernel), tensors)
    exact = attended(TreeAttention(forest, CPU, "dense"), tuple(tensor.double() for tensor in tensors))
    for ours, theirs in zip(found, exact, strict=False):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=5e-6 * max(1.0, float(theirs.abs().max())))


@pytest.mark.parametrize("kernel", ["dense", "cascade", "flex"])
@settings(max_examples=15, deadline=None)
@given(sequences=FORESTS)
def test_kernels_agree_on_random_forests(kernel: Kernel, sequences: Tokens) -> None:
    assert_exact(make_forest(sequences), kernel)


@pytest.mark.parametrize("keys", [0, 1, 1 << 30], ids=["none", "few", "all"])
@pytest.mark.parametrize("long", [1, 1024], ids=["apart", "with their own"])
@settings(max_examples=15, deadline=None)
@given(sequences=FORESTS, in_all=st.sampled_from([1, 3, 1 << 30]), scores=st.sampled_from([64, 1 << 18]))
def test_a_cascade_is_the_same_with_prefixes_repeated_or_met_by_all_behind_them(
    keys: int, long: int, sequences: Tokens, in_all: int, scores: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "REPEATED_A_QUERY", keys)
        patch.setattr(tree_attention, "REPEATED_IN_ALL", in_all)
        patch.setattr(tree_attention, "LONG", long)
        patch.setattr(tree_attention, "SCORES_A_CHUNK", scores)
        assert_exact(make_forest(sequences), "cascade")


@pytest.mark.parametrize("scores", [64, 700, 1 << 18])
def test_a_cascade_is_the_same_in_chunks_of_any_size(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "SCORES_A_CHUNK", scores)
    assert_exact(make_forest(grouped()[0]), "cascade")


def test_kernels_differ_by_rounding_in_bfloat16() -> None:
    forest = make_forest(grouped()[0])
    tensors = drawn(len(forest), torch.bfloat16)
    exact = attended(TreeAttention(forest, CPU, "dense"), tuple(tensor.float() for tensor in tensors))
    for kernel in ("dense", "cascade"):
        for ours, theirs in zip(attended(TreeAttention(forest, CPU, kernel), tensors), exact, strict=True):
            torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=0.02 * float(theirs.abs().max()))


@given(
    sequences=FORESTS,
    keys=st.sampled_from([0, 1, 4, 1 << 30]),
    in_all=st.sampled_from([1, 3, 1 << 30]),
    long=st.sampled_from([1, 1024]),
)
def test_every_query_meets_each_key_that_it_sees_once(sequences: Tokens, keys: int, in_all: int, long: int) -> None:
    forest = make_forest(sequences)
    met = np.zeros((len(forest), len(forest)), int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "REPEATED_A_QUERY", keys)
        patch.setattr(tree_attention, "REPEATED_IN_ALL", in_all)
        patch.setattr(tree_attention, "LONG", long)
        blocks = Cascade(forest, CPU)
    for batch in map(BlockBatch.pad_blocks, (*blocks.own, *blocks.behind)):
        for queries, places, seen in zip(batch.q_BQ, batch.k_BK, batch.seen_BQ, strict=True):
            for query, number in zip(queries, seen, strict=True):
                np.add.at(met[query], places[:number], 1)
    place = np.arange(len(forest))
    assert (met == ((place[None] <= place[:, None]) & (place[:, None] < forest.ends[None]))).all()


def test_the_rule_follows_size_and_device() -> None:
    short, long = (make_forest([np.arange(size, dtype=np.int32)]) for size in (DENSE_PLACES, DENSE_PLACES + 1))
    assert [choose_kernel(short, "cpu"), choose_kernel(long, "cpu"), choose_kernel(short, "cuda")] == list(KERNELS)


# Whole models


def by(kernel: Kernel, rows: RowLayout) -> RowLayout:
    """`rows` with another kernel."""
    assert rows.tree is not None
    return replace(rows, tree=TreeAttention(rows.tree.forest, CPU, kernel))


@pytest.fixture(scope="module", params=[True, False], ids=["qwen2", "llama"])
def model_dir(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, tied=request.param)
    return path


def outcome(model: PolicyModel, rows: RowLayout) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logprobs and entropies as [B, T], and the gradients of a loss of both."""
    model.zero_grad()
    if rows.tree is not None and rows.tree.kernel == "flex":  # torch has no backward for it on a CPU
        with torch.no_grad():
            return [rows.spread_values(values_N) for values_N in model(rows, 0.8, True)], {}
    logprobs_N, entropies_N = model(rows, 0.8, True)
    found = [rows.spread_values(logprobs_N), rows.spread_values(entropies_N)]
    weights_BT = torch.arange(found[0].numel()).cos().view_as(found[0])
    (found[0] * weights_BT + 0.3 * found[1]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [one.detach() for one in found], gradients


def assert_equal(model: PolicyModel, tree: RowLayout, rows: RowLayout) -> None:
    found, gradients = outcome(model, tree)
    expected, expected_gradients = outcome(model, rows)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert tree.tree is not None
    assert gradients.keys() == (expected_gradients.keys() if tree.tree.kernel != "flex" else set())
    for name, ours in gradients.items():
        theirs = expected_gradients[name]
        size = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * size, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kernel", KERNELS)
def test_logprobs_entropies_and_gradients_equal_those_of_rows(model_dir: Path, kernel: Kernel) -> None:
    model = load_policy_model(model_dir)
    tokens, masks = grouped()
    tree, rows = lay_out(tokens, masks, layout="tree"), lay_out(tokens, masks)
    assert tree.num_computed == len(make_forest([ids[:-1] for ids in tokens])) < rows.num_computed / 2
    assert_equal(model, by(kernel, tree), rows)


def test_a_policy_token_in_the_prompt_and_one_of_no_sample(model_dir: Path) -> None:
    """Places of a shared prefix predict several times, and a sample without policy tokens takes part."""
    tokens, masks = grouped(3)
    masks = [np.ones(len(ids), np.bool_) for ids in tokens[:-1]] + [np.zeros(len(tokens[-1]), np.bool_)]
    tree = lay_out(tokens, masks, layout="tree")
    assert tree.places_N.unique().numel() < tree.places_N.numel()
    assert_equal(load_policy_model(model_dir), tree, lay_out(tokens, masks))


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"lora": LoRA(rank=4)}], ids=str)
def test_checkpointed_layers_and_adapters_take_trees(model_dir: Path, options: dict[str, object]) -> None:
    model = load_policy_model(model_dir, **options)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    tokens, masks = grouped(1)
    assert_equal(model, by("cascade", lay_out(tokens, masks, layout="tree")), lay_out(tokens, masks))


@pytest.mark.parametrize("kernel", ["dense", "cascade"])
def test_values_and_scores_equal_those_of_rows(model_dir: Path, kernel: Kernel, tmp_path: Path) -> None:
    model = scalar_model(model_dir, tmp_path)
    tokens, masks = grouped(2)
    pairs = (
        (lay_out(tokens, masks, layout="tree"), lay_out(tokens, masks)),
        (lay_out_ends(tokens, layout="tree"), lay_out_ends(tokens)),
    )
    for tree, rows in pairs:
        gradients = []
        for one in (by(kernel, tree), rows):
            model.zero_grad()
            values_N = model(one)
            (values_N * torch.arange(len(values_N)).cos()).sum().backward()
            gradients.append((values_N.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        torch.testing.assert_close(gradients[0][0], gradients[1][0], rtol=0, atol=1e-5)
        for ours, theirs in zip(gradients[0][1], gradients[1][1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * max(1.0, float(theirs.abs().max())))


def scalar_model(model_dir: Path, tmp_path: Path) -> ScalarModel:
    import json
    import shutil

    shutil.copytree(model_dir, tmp_path / "scalar")
    config = json.loads((model_dir / "config.json").read_text())
    (tmp_path / "scalar" / "config.json").write_text(json.dumps(config | {"pad_token_id": VOCABULARY - 1}))
    return load_scalar_model(tmp_path / "scalar", start="policy")


@pytest.mark.parametrize("kernel", ["dense", "cascade"])
def test_bfloat16_differs_from_rows_by_rounding(model_dir: Path, kernel: Kernel) -> None:
    tokens, masks = grouped()
    exact = load_policy_model(model_dir)(lay_out(tokens, masks))[0].detach()
    model = load_policy_model(model_dir, dtype="bfloat16")
    rows, tree = (
        (model(one)[0].detach() - exact).abs().mean()
        for one in (lay_out(tokens, masks), by(kernel, lay_out(tokens, masks, layout="tree")))
    )
    assert 0 < tree < 1.3 * rows + 0.01 < 0.3


@pytest.mark.parametrize("kernel", ["dense", "cascade"])
def test_altering_a_branch_changes_no_sibling(model_dir: Path, kernel: Kernel) -> None:
    model = load_policy_model(model_dir)
    tokens, masks = grouped(sizes=(4, 2))
    tokens, masks = tokens[:6], masks[:6]  # without the copies
    altered = [ids.copy() for ids in tokens]
    response = policy_places(masks[1])
    altered[1][response] = (altered[1][response] + 1) % VOCABULARY
    found = []
    for given_tokens in (tokens, altered):
        rows = by(kernel, lay_out(given_tokens, masks, layout="tree"))
        logprobs_BT = rows.spread_values(model(rows)[0])
        others = torch.tensor([0, 2, 3, 4, 5])
        model.zero_grad()
        logprobs_BT[others].sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((logprobs_BT.detach(), gradients))
    (before, gradients_before), (after, gradients_after) = found
    assert float((before[1] - after[1]).abs().max()) > 0.1
    torch.testing.assert_close(before[others], after[others], rtol=0, atol=1e-5)
    torch.testing.assert_close(gradients_before, gradients_after, rtol=0, atol=2e-4)


def test_auto_takes_a_tree_only_where_it_saves(model_dir: Path) -> None:
    alike = [np.arange(20, dtype=np.int32) + 5 * (n == 3) for n in range(4)]
    apart = [np.arange(20, dtype=np.int32) + n for n in range(4)]
    assert tree_saves_places(alike) and not tree_saves_places(apart)
    masks = [np.ones(20, np.bool_)] * 4
    assert lay_out(alike, masks, layout="auto").tree is not None
    assert lay_out(apart, masks, layout="auto").tree is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_empty_micro_batch_is_a_tree_too(model_dir: Path, dtype: Dtype) -> None:
    model = load_policy_model(model_dir, dtype=dtype)
    rows = lay_out([np.zeros(2, np.int32)], [np.array([False, True])], layout="tree")
    assert model(rows)[0].shape == (1,)

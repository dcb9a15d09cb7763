"""Ring attention: ranks whose keys and values travel compute what one rank computes.

Real ranks are among the cases of `tests.training.test_training_sequence`; here they are threads.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl import Cluster, Machine, check
from flowrl.graph.load import load_file
from flowrl.nodes import Trainer
from flowrl.training.layouts import Placing, sequence_problems
from flowrl.training.memory import ModelShape, TrainerModel, exchanged_bytes, ring_bytes
from flowrl.training.model import sequence_attention
from flowrl.training.model.policy_model import DTYPES, load_policy_model
from flowrl.training.model.sequence_attention import (
    CpuFlashBlock,
    CudaFlashBlock,
    PlainBlock,
    Ring,
    SequenceGroup,
    Sight,
    make_exchanging,
    ring_attention,
)
from flowrl.training.settings import Dtype, LoRA, SequenceKind, ZeroSettings
from tests.training.test_training_sequence import graph
from tests.training.thread_ranks import Threads, laid_out
from tests.training.training_cases import make_model, make_windowed

CPU = torch.device("cpu")
SCALE = 0.4
HEADS, KEY_HEADS, LENGTH = 4, 1, 24


def attended(q: Tensor, k: Tensor, v: Tensor, sees_LL: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """Attention [R, h, L, D] over everything at once, and the log-sum-exp of its scores."""
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
    scores = q @ k.mT * SCALE
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~sees_LL, -torch.inf)
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)


def drawn(*heads: int, length: int = LENGTH) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, number, length, 8, requires_grad=True) for number in heads]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("ends", "window", "cap"),
    [(None, None, None), ((5, 14, 24), None, None), (None, 5, None), ((5, 14, 24), 4, 1.5), (None, None, 1.5)],
    ids=["rows", "packed", "window", "packed, window, cap", "cap"],
)
def test_a_ring_gives_attention_and_gradients_of_all_positions(
    ends: tuple[int, ...] | None, window: int | None, cap: float | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one head of keys for all ranks, and blocks of which some ranks see nothing."""
    monkeypatch.setattr(sequence_attention, "SCORES_A_CHUNK", 100)
    given = drawn(HEADS, KEY_HEADS, KEY_HEADS)
    place = torch.arange(LENGTH)
    back = place[:, None] - place[None]
    sequence = torch.bucketize(place, torch.tensor(ends or ()), right=True)
    sees = (back >= 0) & (back < (window or LENGTH)) & (sequence[:, None] == sequence[None])
    whole, _ = attended(*given, sees, cap)
    slope = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, given, slope)
    sight = Sight(LENGTH, CPU, None if ends is None else torch.tensor((0, *ends)))

    def work(group: SequenceGroup) -> list[Tensor]:
        mine = group.columns_l(LENGTH, group.rank)
        parts = [one.detach()[:, :, mine].requires_grad_() for one in given]
        found = ring_attention(*parts, Ring(group, sight, SCALE, window, cap)).transpose(1, 2)
        return [found.detach(), *torch.autograd.grad(found, parts, slope[:, :, mine])]

    threads = Threads(size, monkeypatch, "ring")
    order = torch.cat([threads.group(rank).columns_l(LENGTH, rank) for rank in range(size)]).argsort()
    for one, wanted in zip(zip(*threads(work), strict=True), (whole, *expected), strict=True):
        torch.testing.assert_close(torch.cat(one, dim=2)[:, :, order], wanted, rtol=1e-5, atol=1e-5)


def test_ranks_compute_the_same_number_of_scores() -> None:
    q, v = (torch.zeros(1, 1, 6, 8) for _ in range(2))
    for size in (2, 3, 4):
        sight, numbers = Sight(6 * size, CPU), []
        for rank in range(size):
            about = Ring(SequenceGroup(None, rank, size, "ring"), sight, 1.0)
            blocks = [about.make_block(step, q, v) for step in range(size)]
            assert all(isinstance(kernel, CpuFlashBlock) for _, _, kernel in blocks), "no mask is needed"
            numbers.append([len(range(6)[queries]) * len(range(6)[keys]) for queries, keys, _ in blocks])
        assert numbers == [[36, *[18] * (size - 1)]] * size


def test_a_window_computes_the_scores_near_it() -> None:
    """Of 4 ranks and 64 positions, in runs of 8."""
    about = Ring(SequenceGroup(None, 1, 4, "ring"), Sight(64, CPU), 1.0, window=6)
    q = torch.zeros(1, 1, 16, 8)
    widths = []
    for step in range(4):
        queries, keys, kernel = about.make_block(step, q, q)
        assert isinstance(kernel, PlainBlock)
        rows = range(len(range(16)[queries]))
        widths.append([len(range(16)[keys][kernel.seen(slice(n, n + 1))[0]]) for n in rows])
    own, first, last, next_but_one = widths
    assert own == [1, 2, 3, 4, 5, 6, 6, 6] * 2, "positions 8 to 15 and 48 to 55"
    assert first == [5, 4, 3, 2, 1, 0, 0, 0] + [0] * 8, "0 to 7; 56 to 63 come later than all"
    assert last == [0] * 8 and next_but_one == [5, 4, 3, 2, 1, 0, 0, 0], "24 to 39; 16 to 23 and 40 to 47"


@pytest.mark.parametrize("causal", [True, False])
def test_kernels_of_a_block_agree(causal: bool) -> None:
    q, k, v = (one.detach() for one in drawn(4, 2, 2, length=6))
    seen = torch.ones(6, 6, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    plain = PlainBlock(SCALE, lambda rows: (slice(0, 6), seen[rows]))
    expected = plain.forward(q, k, v)
    found = CpuFlashBlock(SCALE, causal).forward(q, k, v)
    wanted = attended(q, k, v, seen, None)
    for one, other, exact in zip(found, expected, wanted, strict=True):
        torch.testing.assert_close(one, exact)
        torch.testing.assert_close(other, exact)
    torch.testing.assert_close(
        CpuFlashBlock(SCALE, causal).backward(q, q, k, v, *found), plain.backward(q, q, k, v, *expected)
    )


@pytest.mark.parametrize("keys", [slice(0, 4), slice(2, 2)])
def test_a_block_of_which_nothing_is_seen_weighs_nothing(keys: slice) -> None:
    q, k, v = (one.detach() for one in drawn(2, 2, 2, length=4))
    block = PlainBlock(SCALE, lambda rows: (keys, torch.zeros(4, 4, dtype=torch.bool)[rows, keys]))
    out, lse = block.forward(q, k, v)
    assert not out.any() and bool(torch.isneginf(lse).all())
    assert not any(one.any() for one in block.backward(q, q, k, v, out, torch.zeros_like(lse)))


def test_the_kernel_for_gpus_is_given_what_its_operators_take() -> None:
    """Shapes alone: nothing is computed on the device "meta"."""
    q, k, v = (one.detach().to("meta", torch.bfloat16) for one in drawn(4, 2, 2, length=6))
    block = CudaFlashBlock(SCALE, causal=True)
    out, lse = block.forward(q, k, v)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [one.shape for one in block.backward(q, q, k, v, out, lse)] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(("kind", "layout"), [("qwen2", "padded"), ("gemma2", "padded"), ("gemma2", "packed")])
@pytest.mark.parametrize("size", [2, 4])
def test_models_give_the_logprobs_of_one_rank(
    kind: str, layout: Placing, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, windows and soft caps; with fewer heads of keys than ranks."""
    make_windowed(tmp_path, kind) if kind == "gemma2" else make_model(tmp_path, tied=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not list(sequence_problems(size, ZeroSettings(), config, kind="ring"))
    model = load_policy_model(tmp_path, attention="sdpa", layout="rows")
    with torch.no_grad():
        expected = model(laid_out("padded"))[0]
    make_exchanging(model.network.config._attn_implementation)
    for found in Threads(size, monkeypatch, "ring").logprobs(model, laid_out(layout)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "key_heads"), [(8, 2), (8, 8)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_most_that_a_ring_has_at_once_is_predicted(
    dtype: Dtype, heads: int, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank alone, which gets what it sends."""
    from torch.profiler import ProfilerActivity, profile

    monkeypatch.setattr(sequence_attention, "start_hop", lambda group, sent: sent.clone)
    tokens, channels = 1024, 64
    sizes = [(1, number, tokens, channels) for number in (heads, key_heads, key_heads)]
    given = [torch.randn(size, dtype=DTYPES[dtype]).requires_grad_() for size in sizes]
    about = Ring(SequenceGroup(None, 1, 4, "ring"), Sight(4 * tokens, CPU), 0.1)
    found = ring_attention(*given, about)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        torch.autograd.grad(found, given, torch.ones_like(found))
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    most = int(np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]).max())
    shape = ModelShape(heads * channels, 1, heads, key_heads, channels, 1, 1)
    assert most <= 1.05 * tokens * ring_bytes(shape, DTYPES[dtype].itemsize) <= 1.4 * most


def test_a_ring_keeps_less_than_an_exchange_of_heads_and_its_blocks_are_counted() -> None:
    shape = ModelShape(512, 4, 8, 2, 64, 1024, 1000)

    def activations(kind: SequenceKind, **sizes: int) -> int:
        about: dict[str, Any] = {"ranks": 8, "scalar": True, "sliced": 4, "kind": kind}
        return TrainerModel(replace(shape, **sizes), ZeroSettings(), LoRA(), **about).activation_bytes(80_000)

    exchanged = 4 * 20_000 * exchanged_bytes(shape, 4, 4)
    blocks = 20_000 * (ring_bytes(shape, 4) - 4 * (2 * 1024 + 512))
    assert blocks > 0 and activations("ulysses") - activations("ring") == exchanged - blocks
    wide = 20_000 * (4 * (2 * 8192 + 512))
    assert activations("ulysses", feed_forward=8192) - activations("ring", feed_forward=8192) == exchanged < wide


# What is refused, and what follows from the kind

CLUSTER = Cluster((Machine(tuple(range(32)), gpus=16),))
RING = ("--trainer.replicas", "6", "--trainer.sequence-parallel-size", "3", "--trainer.sequence-parallel-kind", "ring")


@pytest.mark.parametrize("name", ["grpo", "sft", "dpo", "ppo", "reward_model", "distill", "kto"])
def test_every_graph_with_a_trainer_can_be_a_ring(name: str) -> None:
    """Of three ranks and four heads."""
    made = graph(name, *RING)
    assert check(made, CLUSTER).problems == ()
    trainers = [node for node in made.nodes.values() if isinstance(node, Trainer)]
    assert trainers and {node.sequence_parallel_kind for node in trainers} == {"ring"}
    assert {node.facts().layout for node in trainers} == {"rows"}
    notes = "".join(trainers[0].notes())
    assert "attention as a ring" in notes and "because ring attention computes rows" in notes


def test_the_critics_trainer_has_a_kind_of_its_own() -> None:
    def kind(*given: str) -> Any:
        file = load_file("ppo")
        trainer: Any = file.build(file.parse((*RING, *given))).nodes["critic_trainer"]
        return trainer.sequence_parallel_kind

    assert kind("--critic-trainer.sequence-parallel-kind", "ulysses") == "ulysses"
    assert kind("--critic-trainer.sequence-parallel-size", "1") == "ulysses", "which has nothing to attend to"


@pytest.mark.parametrize(
    ("size", "zero", "config", "words"),
    [
        (3, ZeroSettings(), {"num_attention_heads": 4}, ""),
        (3, ZeroSettings(attention="sdpa"), {"model_type": "mistral", "sliding_window": 9}, ""),
        (3, ZeroSettings(attention="varlen", dtype="bfloat16"), {}, "but ring attention has its own kernels"),
        (3, ZeroSettings(), {"model_type": "mamba"}, "recurrent layers"),
        (1, ZeroSettings(), {}, "sequence_parallel_kind is 'ring', but sequence_parallel_size is 1"),
    ],
)
def test_what_cannot_be_a_ring_is_refused(size: int, zero: ZeroSettings, config: dict[str, Any], words: str) -> None:
    found = list(sequence_problems(size, zero, config, kind="ring"))
    assert [words in problem for problem in found] == ([True] if words else [])


def test_trees_are_refused_where_they_are_asked_for() -> None:
    (problem,) = check(graph("grpo", *RING, "--zero.layout", "tree"), CLUSTER).problems
    assert "layout is 'tree', but ring attention computes rows; set layout to auto" in problem

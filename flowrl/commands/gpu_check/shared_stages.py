"""Stages about GPUs that share a model: ranks that divide positions or matrices, and a scoring model over several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flowrl.commands.gpu_check.bench import Bench
from flowrl.commands.gpu_check.small_model import make_small_model, random_tokens
from flowrl.commands.gpu_check.training_stages import (
    GIB,
    GradientCase,
    exact_products,
    free_bytes,
    free_memory,
    full_gradient,
    judge_gradients,
    make_engine,
    plain_gradients,
    relative_difference,
)
from flowrl.training.model.sequence_attention import make_sequence_group
from flowrl.training.settings import SequenceKind

if TYPE_CHECKING:
    from flowrl.training.engine.gang import Gang

LIMIT, BFLOAT16_LIMIT = 1e-4, 0.05
"""Limits of the differences of gradients and of their norm, as shares of the norm, and of the mean difference of a
logprob; in float32 and in bfloat16, respectively."""
LONG_TOKENS = 4096
KINDS: tuple[SequenceKind, SequenceKind] = ("ulysses", "ring")
POSITIONS = {
    "stage 3": GradientCase({"stage": 3}),
    "stage 3, trees": GradientCase({"stage": 3, "layout": "tree"}),
    "stage 3, packed": GradientCase({"stage": 3, "packing": True}),
    "stage 2, checkpointed": GradientCase({"stage": 2, "gradient_checkpointing": True}),
    "stage 3, bfloat16": GradientCase({"stage": 3, "dtype": "bfloat16"}, BFLOAT16_LIMIT),
}
RING = {
    "ring": GradientCase({"stage": 3}),
    "ring, packed": GradientCase({"stage": 3, "packing": True}),
    "ring, bfloat16": GradientCase({"stage": 3, "dtype": "bfloat16"}, BFLOAT16_LIMIT),
}
"""As `POSITIONS`, with keys and values that travel around all ranks."""
MATRICES = {
    "stage 0": GradientCase({"stage": 0}),
    "stage 1": GradientCase({"stage": 1}),
    "stage 2": GradientCase({"stage": 2}),
    "stage 2, trees": GradientCase({"stage": 2, "layout": "tree"}),
    "stage 2, optimizer offloaded": GradientCase({"stage": 2, "offload": "optimizer"}),
    "stage 2, bfloat16": GradientCase({"stage": 2, "dtype": "bfloat16"}, BFLOAT16_LIMIT),
}
KERNELS = {"varlen": "torch", "flash_attention_2": "flash_attn"}
"""Attention of packed rows in 16 bits, only on a GPU -> its package."""


def sequence_parallel(bench: Bench) -> None:
    """Both ranks have all sequences, and each has half of their positions."""
    kernels = [name for name, package in KERNELS.items() if bench.on_gpu and find_spec(package) is not None]
    _compare_shared(bench, "position_rank", [*POSITIONS, *RING, *kernels])


def tensor_parallel(bench: Bench) -> None:
    """Both ranks have all sequences, and each has half of every matrix of the layers."""
    _compare_shared(bench, "matrix_rank", list(MATRICES))


def _compare_shared(bench: Bench, rank: str, names: Sequence[str]) -> None:
    model = make_small_model(bench.directory / "model")
    torch.save(plain_gradients(model), bench.directory / "plain.pt")
    bench.ranks(f"{__name__}:{rank}", *names)
    found: dict[str, Any] = torch.load(bench.directory / "found.pt")
    for name, text in found["figures"].items():
        bench.figure(name, text)
    judge_gradients(bench, found["gradients"], {name: _make_case(name) for name in names})
    for name, (norm, wanted) in found["norms"].items():
        apart = abs(norm - wanted) / wanted
        limit = _make_case(name).limit
        bench.require(apart <= limit, f"{name}: the norm of the gradient is {norm:.6g}, not {wanted:.6g}")


def _make_case(name: str) -> GradientCase:
    if name in KERNELS:
        return GradientCase({"stage": 3, "dtype": "bfloat16", "attention": name}, BFLOAT16_LIMIT)
    return {**POSITIONS, **RING, **MATRICES}[name]


def position_rank(gang: Gang, directory: Path, names: Sequence[str]) -> None:
    """Rank 0 writes what was found with each case and, on a GPU, also how much memory a long sequence takes."""
    both, ring = (replace(gang, sequence=make_sequence_group(gang.rank, gang.size, gang.size, kind)) for kind in KINDS)
    found = _judge_cases(both, directory, [name for name in names if name not in RING])
    for what, of_ring in _judge_cases(ring, directory, [name for name in names if name in RING]).items():
        found[what] |= of_ring
    if gang.device.type == "cuda":
        for told, who in (("alone", gang), ("shared", both)):
            found["figures"][f"{LONG_TOKENS} tokens, {told}"] = _peak(who, directory)
    if gang.rank == 0:
        torch.save(found, directory / "found.pt")


def matrix_rank(gang: Gang, directory: Path, names: Sequence[str]) -> None:
    """As `position_rank`."""
    found = _judge_cases(replace(gang, tensor_size=gang.size), directory, names)
    if gang.rank == 0:
        torch.save(found, directory / "found.pt")


def _judge_cases(gang: Gang, directory: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    exact_products()
    wanted = torch.load(directory / "plain.pt")
    norm = float(torch.stack([tensor.double().norm() for tensor in wanted.values()]).norm())
    found: dict[str, dict[str, Any]] = {"figures": {}, "gradients": {}, "norms": {}}
    for name in names:
        engine = make_engine(directory / "model", gang, clip_grad_norm=0.0, **_make_case(name).zero)
        found["gradients"][name] = relative_difference(full_gradient(engine), wanted)
        engine.set_lr(0.0)
        found["norms"][name] = engine.step_optimizer().grad_norm, norm
        del engine
        free_memory()
    return found


def _peak(gang: Gang, directory: Path) -> str:
    """Peak memory of forward and backward over one long row on this rank's GPU, in addition to the model's."""
    tokens = random_tokens([LONG_TOKENS])
    engine = make_engine(directory / "model", gang, stage=2, dtype="bfloat16")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    full_gradient(engine, tokens * gang.size)
    text = f"{(torch.cuda.max_memory_allocated() - before) / GIB:.3f} GiB"
    del engine
    free_memory()
    return text


def sharded_scoring(bench: Bench) -> None:
    """A reference over two GPUs, which leaves them and comes back: its logprobs are those of the whole model on a
    CPU."""
    exact_products()
    path = make_small_model(bench.directory / "model", large=bench.on_gpu)
    dtypes = {"float32": LIMIT, **({"bfloat16": BFLOAT16_LIMIT} if bench.on_gpu else {})}
    for dtype, limit in dtypes.items():
        _scored_over_ranks(bench, path, dtype, limit)


def _scored_over_ranks(bench: Bench, path: Path, dtype: Any, limit: float) -> None:
    from flowrl.training.scoring_models import LocalModel, ModelLoad, ShardedModel, logprobs_of, score_items

    load = ModelLoad(str(path), dtype=dtype)
    prompts = random_tokens([20, 7], seed=1)
    responses = random_tokens([30, 12, 25, 9, 18], seed=2)
    tokens = [np.concatenate([prompts[at % 2], one]) for at, one in enumerate(responses)]
    items = [(one, np.arange(len(one)) > 0) for one in tokens]
    whole = LocalModel(replace(load, dtype="float32").load_model())
    sharded = ShardedModel(load, bench.sights(2))
    try:
        for state, moves in {"there": (), "back": (sharded.move_away, sharded.come_back)}.items():
            told = [_time_move(bench, move) for move in moves]
            for budget in (60, 1000):  # several passes of two ranks; one pass, and a rank without any
                expected = score_items(whole, logprobs_of, items, 1.0, token_budget=budget)
                found = score_items(sharded, logprobs_of, items, 1.0, token_budget=budget)
                gap = float(np.mean([np.abs(a - b).mean() for a, b in zip(found, expected, strict=True)]))
                bench.figure(f"{dtype}, {state}, passes of {budget} tokens", f"{gap:.1e}")
                bench.require(gap <= limit, f"logprobs over two ranks in {dtype} differ by {gap:.2e}, not {limit:g}")
            if told and bench.on_gpu:
                bench.figure(f"{dtype}, leaving and coming back free", " and ".join(told))
        sharded.call_everywhere(require_halves)
    finally:
        sharded.close()


def _time_move(bench: Bench, move: Any) -> str:
    device = torch.device(bench.device)
    before = free_bytes(device)
    move()
    return f"{(free_bytes(device) - before) / GIB:.3f} GiB"


def require_halves(model: Any) -> None:
    """Check that this rank has about half of the parameters; runs in the ranks."""
    parameters = list(model.network.parameters())
    mine, all_of_it = sum(p.ds_tensor.numel() for p in parameters), sum(p.ds_numel for p in parameters)
    assert mine < 0.51 * all_of_it, f"this rank has {mine} of {all_of_it} parameters"

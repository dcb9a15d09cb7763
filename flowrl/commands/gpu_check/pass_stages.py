"""Stages about single passes: trees and packed rows against rows, bfloat16 against float32."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flowrl.commands.gpu_check.bench import Bench
from flowrl.commands.gpu_check.small_model import all_masks, make_small_model, random_tokens
from flowrl.commands.gpu_check.training_stages import exact_products, relative_difference
from flowrl.messages import Bool, Int32
from flowrl.training.layouts import Placing
from flowrl.training.model.policy_model import load_policy_model
from flowrl.training.model.row_layout import lay_out
from flowrl.training.settings import Attention, Dtype

if TYPE_CHECKING:
    from flowrl.training.model.policy_model import PolicyModel

FLOAT32_LIMIT, BFLOAT16_LIMIT = 1e-3, 0.05
"""Limits of relative differences of gradients and of mean differences of logprobs."""
REPETITIONS = 3
Passed = tuple[Tensor, dict[str, Tensor]]
"""Logprobs and gradients."""


def trees(bench: Bench) -> None:
    """Groups that share prompts, and a response that continues another one; then a large micro-batch for speed."""
    exact_products()
    path = make_small_model(bench.directory / "model")
    tokens, masks = groups(num=3, size=4, prompt=30, response=20)
    for dtype, limit in (("float32", FLOAT32_LIMIT), ("bfloat16", BFLOAT16_LIMIT)):
        model = load_model(path, bench, dtype, layout="tree")  # type: ignore[arg-type]
        found = passed(model, tokens, masks, "tree", bench), passed(model, tokens, masks, "padded", bench)
        _compare_passes(bench, f"trees, {dtype}", found, limit)
    _tree_speed(bench)


def groups(*, num: int, size: int, prompt: int, response: int) -> tuple[list[Int32], list[Bool]]:
    """Responses of `size` members to each of `num` prompts, and one more that continues the first response."""
    prompts = random_tokens([prompt] * num, seed=1)
    responses = random_tokens([response] * (num * size), seed=2)
    tokens = [np.concatenate([prompts[index // size], one]) for index, one in enumerate(responses)]
    tokens.append(np.concatenate([tokens[0], random_tokens([response], seed=3)[0]]))
    return tokens, [np.arange(len(ids)) >= prompt for ids in tokens]


def _tree_speed(bench: Bench) -> None:
    """Time forward and backward passes over eight responses of 256 tokens to a prompt of 1,024, on a GPU in
    bfloat16."""
    path = make_small_model(bench.directory / "speed", large=bench.on_gpu)
    prompt, response = (1024, 256) if bench.on_gpu else (64, 16)
    model = load_model(path, bench, "bfloat16" if bench.on_gpu else "float32", layout="tree")
    tokens, masks = groups(num=1, size=8, prompt=prompt, response=response)
    seconds = {}
    for layout in ("padded", "tree"):
        times = []
        for _ in range(1 + REPETITIONS):  # the first one compiles
            began = time.perf_counter()
            passed(model, tokens, masks, layout, bench)
            times.append(time.perf_counter() - began)
        seconds[layout] = min(times[1:])
    told = f"{1000 * seconds['tree']:.0f} ms, rows {1000 * seconds['padded']:.0f} ms"
    bench.figure(f"8 × {response} tokens after {prompt} shared", told)


def packing(bench: Bench) -> None:
    """torch's kernels separate packed sequences by a mask, flash attention by its own lengths."""
    exact_products()
    path = make_small_model(bench.directory / "model")
    tokens = random_tokens([40, 7, 33, 18])
    masks = all_masks(tokens)
    kinds: list[tuple[Attention, Dtype, float]] = [("sdpa", "float32", FLOAT32_LIMIT)]
    kernels = {"varlen": "torch", "flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    for attention, module in kernels.items():
        if bench.on_gpu and find_spec(module) is not None:
            kinds.append((attention, "bfloat16", BFLOAT16_LIMIT))  # type: ignore[arg-type]
        else:
            bench.figure(attention, f"left out: {module} is not installed" if bench.on_gpu else "left out: for GPUs")
    for attention, dtype, limit in kinds:
        packed = passed(load_model(path, bench, dtype, attention), tokens, masks, "packed", bench)
        rows = passed(load_model(path, bench, dtype), tokens, masks, "padded", bench)
        _compare_passes(bench, f"{attention}, {dtype}", (packed, rows), limit)


def precision(bench: Bench) -> None:
    """Logprobs of the same sequences on the device in both dtypes, and on a CPU in float32."""
    exact_products()
    path = make_small_model(bench.directory / "model")
    tokens = random_tokens([60, 45, 52, 31])
    masks = all_masks(tokens)
    cpu = Bench("cpu", 0, bench.directory)
    exact = passed(load_model(path, cpu, "float32"), tokens, masks, "padded", cpu)[0]
    for dtype, limit in (("float32", 1e-4), ("bfloat16", BFLOAT16_LIMIT)):
        found = passed(load_model(path, bench, dtype), tokens, masks, "padded", bench)[0]  # type: ignore[arg-type]
        gap = float((found - exact).abs().mean())
        bench.figure(f"mean difference of a logprob, {dtype}", f"{gap:.1e}")
        bench.require(gap <= limit, f"logprobs in {dtype} differ from a CPU's in float32 by {gap:.2e}, not {limit:g}")


def load_model(
    path: Path, bench: Bench, dtype: Dtype, attention: Attention = "sdpa", layout: str = "rows"
) -> PolicyModel:
    model = load_policy_model(path, dtype=dtype, attention=attention, layout=layout, tries=False)  # type: ignore[arg-type]
    return model.to(bench.device)


def passed(model: PolicyModel, tokens: list[Int32], masks: list[Bool], layout: Placing, bench: Bench) -> Passed:
    """Logprobs of the policy tokens, and the gradient of their mean, in host memory."""
    model.zero_grad()
    rows = lay_out(tokens, masks, layout=layout, device=torch.device(bench.device))
    logprobs_N = model(rows, 1.0)[0]
    logprobs_N.mean().backward()
    named = model.network.named_parameters()
    gradients = {name: p.grad.float().cpu().clone() for name, p in named if p.grad is not None}
    return logprobs_N.detach().float().cpu(), gradients


def _compare_passes(bench: Bench, name: str, found: tuple[Passed, Passed], limit: float) -> None:
    (logprobs, gradients), (wanted, wanted_gradients) = found
    gap = float((logprobs - wanted).abs().mean())
    difference = relative_difference(gradients, wanted_gradients)
    bench.figure(name, f"logprobs {gap:.1e}, gradients {difference:.1e}")
    bench.require(gap <= limit, f"{name}: logprobs differ from those of rows by {gap:.2e}, not {limit:g}")
    bench.require(
        difference <= limit, f"{name}: gradients differ from those of rows by {difference:.2e}, not {limit:g}"
    )

"""Stages about training: gradients under ZeRO, a trainer that leaves its device, adapters."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowrl.commands.gpu_check.bench import Bench
from flowrl.commands.gpu_check.small_model import all_masks, make_small_model, random_tokens
from flowrl.messages import Int32
from flowrl.training.model.row_layout import lay_out
from flowrl.training.model.tensors import gather_whole
from flowrl.training.settings import LoRA, ZeroSettings

if TYPE_CHECKING:
    from flowrl.training.engine.gang import Gang
    from flowrl.training.engine.zero import ZeroEngine

ROUNDS = 20
GIB = 1 << 30
LEFT_BYTES = GIB // 2
"""What a process may keep on a device while it is away, besides its CUDA context: workspaces, NCCL."""
SPREAD_BYTES = 64 << 20
"""By how much that may differ from one time to the next."""
SEQUENCES = random_tokens([40, 25, 33, 18, 29, 37])
NUM_TOKENS = sum(len(ids) - 1 for ids in SEQUENCES)


@dataclass(frozen=True)
class GradientCase:
    """Settings under which gradients have to be those of a plain pass, up to `limit` of their norm."""

    zero: dict[str, Any]
    limit: float = 1e-4


CASES = {
    "stage 2": GradientCase({"stage": 2}),
    "stage 3": GradientCase({"stage": 3}),
    "stage 2, optimizer offloaded": GradientCase({"stage": 2, "offload": "optimizer"}),
    "stage 3, optimizer offloaded": GradientCase({"stage": 3, "offload": "optimizer"}),
    "stage 3, all offloaded": GradientCase({"stage": 3, "offload": "all"}),
    "stage 3, checkpointed": GradientCase({"stage": 3, "gradient_checkpointing": True}),
    "stage 3, bfloat16": GradientCase({"stage": 3, "dtype": "bfloat16"}, 0.05),
}


def gradients(bench: Bench) -> None:
    """Every rank has a part of the sequences; the gradient is that of all sequences."""
    model = make_small_model(bench.directory / "model")
    torch.save(plain_gradients(model), bench.directory / "plain.pt")
    bench.figure("ranks", str(bench.num_ranks))
    bench.ranks(f"{__name__}:gradient_rank", *CASES)
    judge_gradients(bench, torch.load(bench.directory / "differences.pt"), CASES)


def judge_gradients(bench: Bench, found: Mapping[str, float], cases: Mapping[str, GradientCase]) -> None:
    """Report by how much the gradient of each case differs, and require that none differs by more than its limit."""
    for name, difference in found.items():
        bench.figure(name, f"{difference:.1e}")
    for name, difference in found.items():
        limit = cases[name].limit
        bench.require(difference <= limit, f"{name}: gradients differ by {difference:.2e} of their norm, not {limit:g}")


def plain_gradients(path: Path) -> dict[str, Tensor]:
    """The gradient of the mean negative logprob of SEQUENCES, in float32 on a CPU, without DeepSpeed."""
    from flowrl.training.model.policy_model import load_policy_model

    model = load_policy_model(path, layout="rows")
    logprobs_N, _ = model(lay_out(SEQUENCES, all_masks(SEQUENCES)), 1.0)
    (-logprobs_N.sum() / NUM_TOKENS).backward()
    return {name: p.grad for name, p in model.causal_lm.named_parameters() if p.grad is not None}


def gradient_rank(gang: Gang, directory: Path, names: Sequence[str]) -> None:
    """Rank 0 writes by how much the gradient of each case differs."""
    exact_products()
    wanted: dict[str, Tensor] = torch.load(directory / "plain.pt")
    found = {}
    for name in names:
        engine = make_engine(directory / "model", gang, **CASES[name].zero)
        found[name] = relative_difference(full_gradient(engine), wanted)
        del engine
        free_memory()
    if gang.rank == 0:
        torch.save(found, directory / "differences.pt")


def full_gradient(engine: ZeroEngine, sequences: list[Int32] = SEQUENCES) -> dict[str, Tensor]:
    """The gradient of the mean negative logprob of `sequences`, which are divided among the ranks, or among groups of
    ranks that share them."""
    from deepspeed.utils import safe_get_full_grad

    gang, shared = engine.gang, engine.gang.ranks_per_part
    mine = sequences[gang.rank // shared :: gang.size // shared]
    rows = lay_out(mine, all_masks(mine), layout=engine.layout, device=engine.device)
    logprobs_N, _ = engine.forward(rows, temperature=1.0)
    engine.add_gradient(-logprobs_N.sum() / NUM_TOKENS, last=True)
    named = engine.model.network.named_parameters()
    return {name: gather_whole(safe_get_full_grad(p), p).float().cpu().clone() for name, p in named}


def make_engine(path: Path, gang: Gang, *, stage: int, **settings: Any) -> ZeroEngine:
    """An engine that shards at that stage even if its rank is the only one."""
    from flowrl.training.engine.zero import ZeroEngine

    torch.manual_seed(0)
    sharded = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    given = {"attention": "sdpa", "layout": "rows", **settings}
    return ZeroEngine(path, ZeroSettings(stage=stage, deepspeed=sharded, **given), gang)


def residence(bench: Bench) -> None:
    """Run in one process, which shards although it is the only one."""
    from flowrl.training.engine.gang import Gang

    exact_products()
    torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device("cuda", 0) if bench.on_gpu else torch.device("cpu")
    model = make_small_model(bench.directory / "model", large=bench.on_gpu, dtype="bfloat16")
    gang = Gang.meet_ranks(0, 1, "", device)
    if bench.on_gpu:
        _locked_twice(bench)
    for stage in (2, 3):
        _residence_at(bench, model, gang, stage)


def _locked_twice(bench: Bench) -> None:
    """Host memory that cannot be page-locked, here because it already is, costs only time."""
    from flowrl.training.engine.residence import page_lock, page_unlock

    memory = torch.empty(1 << 20, dtype=torch.uint8)
    outcomes = [page_lock(memory) for _ in range(2)]
    total = torch.ones(3, device=bench.device).sum().item()
    page_unlock(memory)
    bench.figure("page-locked, and once more", str(outcomes))
    bench.require(outcomes == [True, False] and total == 3, f"page-locking gave {outcomes}")


def _residence_at(bench: Bench, path: Path, gang: Gang, stage: int) -> None:
    from flowrl.training.engine.residence import Residence

    engine = make_engine(path, gang, stage=stage, dtype="bfloat16")
    wanted = [_take_step(engine, number) for number in range(3)], _read_weights(engine)
    del engine
    free_memory()
    before = free_bytes(gang.device)
    engine = make_engine(path, gang, stage=stage, dtype="bfloat16")
    norms = [_take_step(engine, 0)]
    moving = Residence(engine, gang.device)
    free, leaving, returning, moved = [], [], [], 0
    for _ in range(ROUNDS):
        began = time.perf_counter()
        moved = moving.move_away()
        left = time.perf_counter()
        free.append(free_bytes(gang.device))
        back = time.perf_counter()
        moving.come_back()
        leaving.append(left - began)
        returning.append(time.perf_counter() - back)
    norms += [_take_step(engine, number) for number in (1, 2)]
    same = norms == wanted[0] and all(map(torch.equal, _read_weights(engine), wanted[1]))
    name = f"stage {stage}"
    bench.figure(f"{name}, moved", f"{moved / GIB:.3f} GiB")
    bench.figure(f"{name}, leaves", f"{moved / min(leaving) / 1e9:.1f} GB/s")
    bench.figure(f"{name}, returns", f"{moved / min(returning) / 1e9:.1f} GB/s")
    bench.figure(f"{name}, next steps", "equal" if same else "differ")
    if bench.on_gpu:
        kept, spread = before - min(free), max(free) - min(free)
        bench.figure(f"{name}, left on the device", f"{kept / GIB:.3f} GiB, within {spread / GIB:.3f}")
        bench.require(kept <= LEFT_BYTES, f"{name}: {kept / GIB:.2f} GiB stayed on the device between turns")
        bench.require(spread <= SPREAD_BYTES, f"{name}: what stays on the device grows, by {spread / GIB:.2f} GiB")
    bench.require(same, f"{name}: steps after {ROUNDS} turns differ from those without turns")
    del engine, moving
    free_memory()


def _take_step(engine: ZeroEngine, number: int) -> float:
    rows = lay_out(SEQUENCES[number:], all_masks(SEQUENCES[number:]), device=engine.device)
    engine.set_lr(1e-3)
    logprobs_N, _ = engine.forward(rows, temperature=1.0)
    engine.add_gradient(-logprobs_N.sum() / NUM_TOKENS, last=True)
    return engine.step_optimizer().grad_norm


def _read_weights(engine: ZeroEngine) -> list[Tensor]:
    return [tensor.cpu().clone() for _, tensors in engine.buckets(1 << 28) for tensor in tensors]


def lora(bench: Bench) -> None:
    """An adapter whose two factors are both random, so that both have gradients."""
    exact_products()
    path = make_small_model(bench.directory / "model")
    found = [_adapter_gradients(path, device) for device in ("cpu", bench.device)]
    difference = relative_difference(found[1], found[0])
    bench.figure("gradients of adapters", f"{difference:.1e}")
    bench.require(difference <= 1e-4, f"gradients of adapters differ by {difference:.2e} of their norm")


def _adapter_gradients(path: Path, device: str) -> dict[str, Tensor]:
    from flowrl.training.model.policy_model import load_policy_model

    torch.manual_seed(0)
    model = load_policy_model(path, lora=LoRA(rank=8), layout="rows")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.normal_(std=0.02)
    model.to(device)
    rows = lay_out(SEQUENCES, all_masks(SEQUENCES), device=torch.device(device))
    model(rows, 1.0)[0].sum().backward()
    return {name: p.grad.cpu() for name, p in trained.items() if p.grad is not None}


def qlora(bench: Bench) -> None:
    """A few steps of Adam, and then one move off the device and back."""
    from flowrl.training.engine.residence import Residence
    from flowrl.training.model.policy_model import load_policy_model

    path = make_small_model(bench.directory / "model")
    device = torch.device("cuda", 0) if bench.on_gpu else torch.device("cpu")
    model = load_policy_model(path, lora=LoRA(rank=8, quantize="nf4", sync="merged"), layout="rows").to(device)
    rows = lay_out(SEQUENCES, all_masks(SEQUENCES), device=device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    sums = []
    for _ in range(4):
        optimizer.zero_grad()
        total = model(rows, 1.0)[0].sum()
        (-total).backward()
        optimizer.step()
        sums.append(float(total.detach()))
    with torch.no_grad():
        wanted = model(rows, 1.0)[0].clone()
    del rows, total
    moving = Residence((model, optimizer), device)
    moved = moving.move_away()
    moving.come_back()
    with torch.no_grad():
        again = model(lay_out(SEQUENCES, all_masks(SEQUENCES), device=device), 1.0)[0]
    bench.figure("sum of logprobs", f"{sums[0]:.1f} to {sums[-1]:.1f} in {len(sums)} steps")
    bench.figure("moved", f"{moved / (1 << 20):.1f} MiB")
    bench.require(sums[-1] > sums[0], "the adapter learns nothing")
    bench.require(torch.equal(wanted, again), "after a turn the quantized model gives other logprobs")


def relative_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Norm of the difference divided by the norm of `wanted`, over all tensors together."""
    if found.keys() != wanted.keys():
        return float("inf")
    error = sum(float((found[name].double() - wanted[name].double()).square().sum()) for name in wanted)
    return math.sqrt(error / sum(float(tensor.double().square().sum()) for tensor in wanted.values()))


def exact_products() -> None:
    """Compute float32 products in float32, not in TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; 0 if it is a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])

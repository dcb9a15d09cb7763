"""How fast the device is: matrix products, copies, a step of training."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from flowrl.commands.gpu_check.bench import Bench
from flowrl.commands.gpu_check.small_model import all_masks, make_small_model, random_tokens
from flowrl.training.model.row_layout import lay_out
from flowrl.training.settings import ZeroSettings

REPETITIONS = 5


def speeds(bench: Bench) -> None:
    """For each measurement, the best of several repetitions, after one that does not count."""
    device = torch.device("cuda", 0) if bench.on_gpu else torch.device("cpu")
    _products(bench, device)
    _copies(bench, device)
    _time_training(bench, device)


def _products(bench: Bench, device: torch.device) -> None:
    size = 8192 if bench.on_gpu else 512
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = best_s(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        name = str(dtype).removeprefix("torch.")
        bench.figure(f"products of {size}, {name}", f"{2 * size**3 / seconds / 1e12:.2f} TFLOP/s")


def _copies(bench: Bench, device: torch.device) -> None:
    num_bytes = (1 << 30) if bench.on_gpu else (1 << 26)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(there)
    ways = {"within the device": (other, there)}
    if bench.on_gpu:
        pageable = torch.empty(num_bytes, dtype=torch.uint8)
        pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        ways |= {"to pinned memory": (pinned, there), "from pinned memory": (there, pinned)}
        ways |= {"to pageable memory": (pageable, there), "from pageable memory": (there, pageable)}
    for name, (into, source) in ways.items():
        seconds = best_s(lambda into=into, source=source: into.copy_(source, non_blocking=True), device)  # type: ignore[misc]
        bench.figure(f"copies {name}", f"{num_bytes / seconds / 1e9:.1f} GB/s")
    if bench.num_gpus > 1:
        far = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1")
        seconds = best_s(lambda: far.copy_(there, non_blocking=True), device)
        bench.figure("copies to another GPU", f"{num_bytes / seconds / 1e9:.1f} GB/s")


def _time_training(bench: Bench, device: torch.device) -> None:
    from flowrl.training.engine.gang import Gang
    from flowrl.training.engine.zero import ZeroEngine

    path = make_small_model(bench.directory / "model", large=bench.on_gpu, dtype="bfloat16")
    gang = Gang.meet_ranks(0, 1, "", device)
    zero = ZeroSettings(stage=2, dtype="bfloat16", layout="rows", gradient_checkpointing=bench.on_gpu)
    engine = ZeroEngine(path, zero, gang)
    engine.set_lr(1e-5)
    tokens = random_tokens([1024] * 8 if bench.on_gpu else [64] * 2)
    rows = lay_out(tokens, all_masks(tokens), layout=engine.layout, device=device)

    def step() -> None:
        logprobs_N, _ = engine.forward(rows, temperature=1.0)
        engine.add_gradient(-logprobs_N.mean(), last=True)
        engine.step_optimizer()

    seconds = best_s(step, device)
    count = sum(p.numel() for p in engine.model.parameters())
    num_tokens = sum(map(len, tokens))
    bench.figure("parameters", f"{count / 1e6:.0f} M")
    bench.figure(f"step of {num_tokens} tokens", f"{seconds:.3f} s, {num_tokens / seconds:.0f} tokens/s")


def best_s(work: Callable[[], object], device: torch.device) -> float:
    """The shortest time of `work`, until the device has done it."""
    times = []
    for _ in range(1 + REPETITIONS):
        _wait_for_device(device)
        began = time.perf_counter()
        work()
        _wait_for_device(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)

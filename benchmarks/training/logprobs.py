"""Logprobs of given tokens and their gradients on a CPU: in cache with kept slopes, against chunks of logits.

    python -m benchmarks.training.logprobs [--places 1171] [--hidden 576] [--vocabulary 49152] [--dtype bfloat16]
        [--repetitions 5] [--threads 1]

The sizes are those of an update of SmolLM2-135M with 8 groups of 8 samples of 12 to 24 tokens in trees. Seconds are
CPU seconds, so other work on the machine counts less. Each repetition runs both ways, in turns which one first, after
one of each that is not measured; the table has medians with the smallest and the largest. `differ` is the norm of the
difference over the norm, of the hidden states' gradients and of the weight's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import process_time
from typing import get_args

import torch
from torch import Tensor

from flowrl.training.model import logprobs
from flowrl.training.settings import Dtype

WAYS: dict[str, tuple[str, ...]] = {"chunks": (), "cached": ("cpu",)}
"""Value of `CACHED_ON` for each way."""


def make_pass(places: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> Callable[[str], list[Tensor]]:
    """A function that runs forward and backward one way; it returns the two gradients."""
    torch.manual_seed(0)
    hidden_NH = torch.randn(places, hidden).to(dtype).requires_grad_()
    weight_VH = (0.1 * torch.randn(vocabulary, hidden)).to(dtype).requires_grad_()
    targets_N, upstream_N = torch.randint(vocabulary, (places,)), torch.randn(places)

    def run(way: str) -> list[Tensor]:
        logprobs.CACHED_ON = WAYS[way]
        found_N, _ = logprobs.chunked_logprobs(hidden_NH, weight_VH, None, targets_N)
        return list(torch.autograd.grad((found_N * upstream_N).sum(), (hidden_NH, weight_VH)))

    return run


def timed(run: Callable[[str], object], way: str) -> float:
    start = process_time()
    run(way)
    return process_time() - start


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--places", type=int, default=1171)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run = make_pass(args.places, args.hidden, args.vocabulary, getattr(torch, args.dtype))
    differ = [difference(*pair) for pair in zip(run("cached"), run("chunks"), strict=True)]
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repetition in range(args.repetitions):
        for way in WAYS if repetition % 2 else reversed(WAYS):
            seconds[way].append(timed(run, way))
    for way, found in seconds.items():
        print(f"{way}: {statistics.median(found):.2f} CPU s ({min(found):.2f}–{max(found):.2f})")
    ratios = [old / new for old, new in zip(seconds["chunks"], seconds["cached"], strict=True)]
    print(f"faster: {statistics.median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f})")
    print(f"differ: {differ[0]:.1e} (hidden), {differ[1]:.1e} (weight)")


if __name__ == "__main__":
    main()

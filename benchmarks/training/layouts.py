"""A trainer's update with samples in rows against trees of shared prefixes, in one process and interleaved.

Trees are those of the layout "auto", which keeps rows where nothing is shared.

    python -m benchmarks.training.layouts [--policy smollm2] [--dtype bfloat16] [--case 8x40x24 16x1000x16 1x40x24]
        [--samples 4 8 16 --prompt 40 200 1000 --response 16 200] [--groups 8] [--repetitions 5] [--threads 1]
        [--plain-malloc] [--json FILE]

A case is K samples of a prompt of P tokens, with responses of R/2 to R tokens; all combinations of --samples, --prompt
and --response if no --case is given. Prompts and responses are random tokens. One update is one forward and backward
pass over all groups and one optimizer step. Each repetition runs both layouts, in turns which one first, after one
update of each that is not measured. The table gives medians with the smallest and the largest; `norms differ`
is the largest relative difference of the gradient norms of the first update, which starts from the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from flowrl.messages import Batch, Trainable
from flowrl.models import Policy, resolve
from flowrl.runtime.driver.resources import malloc_variables
from flowrl.training.settings import Dtype, ZeroSettings

if TYPE_CHECKING:
    from flowrl.training.engine.zero import ZeroEngine

Way = Literal["rows", "auto"]
WAYS: tuple[Way, ...] = get_args(Way)
HEADS = ("K", "prompt", "response", "rows s", "auto s", "faster", "tokens in rows", "tokens in auto", "norms differ")


@dataclass(frozen=True)
class Shape:
    """The samples of one case."""

    samples: int
    prompt: int
    response: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        try:
            samples, prompt, response = (int(part) for part in text.split("x"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no case; write KxPROMPTxRESPONSE, as 8x40x24") from None
        if min(samples, prompt, response) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} has a number below 1")
        return cls(samples, prompt, response)


@dataclass(frozen=True)
class Measured:
    """One layout of one case."""

    shape: Shape
    way: Way
    seconds: tuple[float, ...]
    tokens_computed: int
    first_grad_norm: float


def make_batch(shape: Shape, groups: int, vocab_size: int, token_budget: int) -> Batch:
    """Groups of random tokens; advantages are drawn too."""
    draw = np.random.default_rng(0)
    samples = []
    for group in range(groups):
        prompt = draw.integers(0, vocab_size, shape.prompt)
        for member in range(shape.samples):
            response = draw.integers(0, vocab_size, draw.integers((shape.response + 1) // 2, shape.response + 1))
            samples.append(_sample(draw, group, member, np.concatenate([prompt, response]), shape))
    tokens = sum(sample.response_tokens for sample in samples)
    return Batch(
        tuple(samples), (), num_sequences=len(samples), num_tokens=tokens, num_groups=groups, token_budget=token_budget
    )


def _sample(draw: np.random.Generator, group: int, member: int, tokens: np.ndarray, shape: Shape) -> Trainable:
    mask = np.arange(len(tokens)) >= shape.prompt
    return Trainable(
        sample_id=f"{group}-{member}",
        group_id=f"{group}",
        prompt_id=f"{group}",
        epoch=0,
        member=member,
        group_size=shape.samples,
        prompt_text="",
        response_text="",
        token_ids=tokens.astype(np.int32),
        policy_mask=mask,
        behavior_logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        prompt_tokens=shape.prompt,
        truncated=False,
        generator="",
        advantages=np.where(mask, draw.normal(), 0.0).astype(np.float32),
    )


class Bench:
    """One trainer whose layout is switched between updates."""

    def __init__(self, engine: ZeroEngine, token_budget: int) -> None:
        from flowrl.training.learner import Learner
        from flowrl.training.loss.policy_objective import PolicyObjective

        self._engine = engine
        self._learner = Learner(engine, PolicyObjective(old="behavior", correction=None))
        self._token_budget = token_budget

    def update(self, batch: Batch, way: Way) -> tuple[float, int, float]:
        """(seconds, tokens computed, gradient norm) of one update. The learning rate is 0: weights stay the same."""
        self._engine.layout = "auto" if way == "auto" else "padded"
        start = perf_counter()
        (part,) = replace(batch, layout=way).split(1)
        found = self._learner.train_piece(part, [sample.policy_mask for sample in part.samples], 0, 0.0)
        assert found is not None
        return perf_counter() - start, found.tokens_computed, found.grad_norm or 0.0

    def measure(self, shape: Shape, groups: int, repetitions: int) -> Iterator[Measured]:
        batch = make_batch(shape, groups, self._engine.vocab_size, self._token_budget)
        first = {way: self.update(batch, way) for way in WAYS}
        seconds: dict[Way, list[float]] = {way: [] for way in WAYS}
        for repetition in range(repetitions):
            for way in WAYS if repetition % 2 else reversed(WAYS):
                seconds[way].append(self.update(batch, way)[0])
        for way in WAYS:
            _, tokens, norm = first[way]
            yield Measured(shape, way, tuple(seconds[way]), tokens, norm)


def row(rows: Measured, auto: Measured) -> tuple[str, ...]:
    """The line of the table of one case."""
    faster = statistics.median(rows.seconds) / statistics.median(auto.seconds)
    differ = abs(rows.first_grad_norm - auto.first_grad_norm) / max(rows.first_grad_norm, 1e-12)
    return (
        f"{rows.shape.samples}",
        f"{rows.shape.prompt}",
        f"{rows.shape.response}",
        _spread(rows.seconds),
        _spread(auto.seconds),
        f"{faster:.2f}×",
        f"{rows.tokens_computed}",
        f"{auto.tokens_computed}",
        f"{differ:.1e}",
    )


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f})"


def keep_memory(*, plain: bool) -> None:
    """Begin again with the allocator's settings of a run's trainer, which a process takes when it starts."""
    if not plain and (wanted := malloc_variables(os.environ)):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})


def load(policy: str, dtype: Dtype, threads: int) -> ZeroEngine:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    from flowrl.training.engine.gang import Gang
    from flowrl.training.engine.zero import ZeroEngine

    torch.set_num_threads(threads)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    gang = Gang.meet_ranks(0, 1, address, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    return ZeroEngine(resolve(Policy(policy)), ZeroSettings(dtype=dtype, layout="auto"), gang)


def main() -> None:
    parser = argparse.ArgumentParser(description="A trainer's update: rows against trees of shared prefixes.")
    parser.add_argument("--policy", default="smollm2", help="tiny, smollm2 or a model directory")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--case", nargs="*", type=Shape.parse, default=[], help="KxPROMPTxRESPONSE, as 8x40x24")
    parser.add_argument("--samples", nargs="*", type=int, default=[4, 8, 16])
    parser.add_argument("--prompt", nargs="*", type=int, default=[40, 200, 1000])
    parser.add_argument("--response", nargs="*", type=int, default=[16, 200])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plain-malloc", action="store_true", help="do not keep memory as a trainer of a run does")
    parser.add_argument("--json", type=Path, help="append a line for each case and layout")
    args = parser.parse_args()
    keep_memory(plain=args.plain_malloc)
    shapes = args.case or [Shape(*shape) for shape in product(args.samples, args.prompt, args.response)]
    bench = Bench(load(args.policy, args.dtype, args.threads), args.token_budget)
    print(f"{args.policy} {args.dtype}, {args.groups} groups, {args.threads} threads, {args.repetitions} repetitions")
    print(" | ".join(HEADS), flush=True)
    for shape in shapes:
        rows, auto = bench.measure(shape, args.groups, args.repetitions)
        print(" | ".join(row(rows, auto)), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.writelines(json.dumps(asdict(one)) + "\n" for one in (rows, auto))


if __name__ == "__main__":
    main()

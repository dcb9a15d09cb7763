"""Where the time of a trainer's update goes, and what share of the machine's matmul rate it reaches.

    python -m benchmarks.training.kernels [--policy smollm2] [--dtype bfloat16] [--case 8x40x24] [--groups 8]
        [--threads 1] [--plain-malloc] [--plain-products]
        [--repetitions 3] [--json FILE] [--top 0]

A case is K samples of a prompt of P tokens with responses of R/2 to R tokens, laid out as trees. `--repetitions`
updates are timed without a profiler; more run under torch's profiler, and the fastest of these gives the shares: parts
of the update (layers, attention, logits, gradients, optimizer) by kinds of operation (matmul, copy, elementwise, the
fused optimizer). Time that is in no operation of torch's, such as Python's, is told apart.

The matmul rate is measured here, on the same threads and just after: the products that the profiled update made, of
the same shapes and dtype, each repeated alone on warm memory. Together these take
the least time that the update's matmuls can take with torch's kernels; the share of the machine's rate is that time
over the time of an update. On a machine with other work, CPU seconds say more than seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, get_args

import torch

from benchmarks.training.layouts import Bench, Shape, keep_memory, load, make_batch
from flowrl.training.model.products import PLAIN, multiply_matrices
from flowrl.training.settings import Dtype

PARTS = ("layers", "attention", "logits", "gradients", "optimizer")
KINDS = ("matmul", "copy", "elementwise", "optimizer")
ONEDNN = "mkldnn::_linear_pointwise"
"""A product that `flowrl.training.model.products` gives to oneDNN; its second factor is transposed."""
FACTORS = {ONEDNN: 0, "aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::baddbmm": 1}
"""Matrix products: where their two factors begin among the arguments."""
COPIES = (
    "aten::copy_",
    "aten::index_select",
    "aten::index_copy_",
    "aten::cat",
    "aten::zero_",
    "aten::fill_",
    "aten::gather",
)
PROFILES = 5
"""Updates under the profiler, of which the fastest counts: the profiler's own memory moves the update's."""
LEAST_SECONDS = 0.2
"""Time for which each product is repeated."""


@dataclass(frozen=True)
class Product:
    """One matrix product: shapes, as torch's profiler names them."""

    name: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        first, second = self.shapes
        return 2 * first[-2] * first[-1] * second[-1] * (first[0] if len(first) == 3 else 1)


@dataclass(frozen=True)
class Profile:
    """One profiled update."""

    seconds: float
    by_part: Mapping[tuple[str, str], float]
    """(part, kind): seconds of operations."""
    by_name: Mapping[str, float]
    """Operation: seconds in it alone."""
    products: Mapping[Product, int]
    """How many times each was made."""

    @property
    def flops(self) -> int:
        return sum(product.flops * number for product, number in self.products.items())

    @property
    def unseen_s(self) -> float:
        """Seconds in no operation."""
        return self.seconds - sum(self.by_part.values())


def kind_of(name: str) -> str:
    """The kind of an operation of torch's."""
    if name in FACTORS:
        return "matmul"
    if name in COPIES:
        return "copy"
    return "optimizer" if name == "aten::_fused_adamw_" else "elementwise"


@contextmanager
def labelled() -> Iterator[None]:
    """Within this context the parts of an update carry their names in a profile."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    from flowrl.training.engine import optimizer
    from flowrl.training.model.logprobs import _CachedLogprobs, _ChunkedLogprobs
    from flowrl.training.model.tree_attention import _CascadeAttention

    places: list[tuple[Any, str, str]] = [
        (_CascadeAttention, "forward", "attention"),
        (_CascadeAttention, "backward", "attention"),
        (_ChunkedLogprobs, "forward", "logits"),
        (_ChunkedLogprobs, "backward", "logits"),
        (_CachedLogprobs, "forward", "logits"),
        (_CachedLogprobs, "backward", "logits"),
        (DeepSpeedZeroOptimizer, "step", "optimizer"),
        (DeepSpeedZeroOptimizer, "process_gradients", "gradients"),
        (optimizer, "_take_gradient", "gradients"),
        (DeepSpeedZeroOptimizer, "reduce_gradients", "gradients"),
        (DeepSpeedZeroOptimizer, "overlapping_partition_gradients_reduce_epilogue", "gradients"),
    ]
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in places]
    for owner, name, label in places:
        setattr(owner, name, _recorded(owner.__dict__[name], label))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _recorded(function: Any, label: str) -> Any:
    static = isinstance(function, staticmethod)
    inner = function.__func__ if static else function

    def recorded(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(f"part: {label}"):
            return inner(*args, **kwargs)

    return staticmethod(recorded) if static else recorded


def profiled(update: Callable[[], object]) -> Profile:
    """Run an update under torch's profiler."""
    with (
        labelled(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler,
    ):
        start = perf_counter()
        update()
        seconds = perf_counter() - start
    return _summed(profiler.events(), seconds)


def _summed(events: Sequence[Any], seconds: float) -> Profile:
    by_part: dict[tuple[str, str], float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    products: Counter[Product] = Counter()
    for event in events:
        if not event.name.startswith("aten::") and event.name != ONEDNN:
            continue
        alone_s = event.self_cpu_time_total / 1e6
        by_part[_part_of(event), kind_of(event.name)] += alone_s
        by_name[event.name] += alone_s
        if event.name in FACTORS and (shapes := _factors(event.name, event.input_shapes)):
            products[Product(event.name, shapes)] += 1
    return Profile(seconds, by_part, by_name, products)


def _factors(name: str, shapes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The two factors among an operation's arguments; none if one of them is empty."""
    found = tuple(tuple(shape) for shape in shapes[FACTORS[name] : FACTORS[name] + 2])
    if name == ONEDNN:
        (*rows, width), (_, _) = found
        found = ((math.prod(rows), width), found[1][::-1])
    return found if all(0 not in shape for shape in found) else ()


def _part_of(event: Any) -> str:
    above = event
    while above is not None:
        if above.name.startswith("part: "):
            return str(above.name.removeprefix("part: "))
        above = above.cpu_parent
    return "layers"


def alone_s(product: Product, dtype: torch.dtype) -> float:
    """Seconds of one product of these shapes on warm memory, least of its repetitions."""
    first, second = (torch.randn(shape, dtype=dtype) for shape in product.shapes)
    multiply = multiply_matrices if product.name == ONEDNN else torch.matmul
    multiply(first, second)
    seconds: list[float] = []
    while sum(seconds) < LEAST_SECONDS or len(seconds) < 3:
        start = perf_counter()
        multiply(first, second)
        seconds.append(perf_counter() - start)
    return min(seconds)


@dataclass(frozen=True)
class Rate:
    """What the products of an update take alone."""

    seconds: float
    flops: int

    @property
    def gflops(self) -> float:
        return self.flops / self.seconds / 1e9


def rate_of(profile: Profile, dtype: torch.dtype) -> Rate:
    """The rate at which this machine makes the update's products; attention's are in float32 for every dtype."""
    seconds = 0.0
    for product, number in profile.products.items():
        seconds += number * alone_s(product, torch.float32 if "bmm" in product.name else dtype)
    return Rate(seconds, profile.flops)


def report(dtype: str, timed_s: Sequence[float], cpu_s: float, profile: Profile, rate: Rate, top: int) -> str:
    """The rates, and the table of parts by kinds as shares of the profiled update."""
    middle_s = statistics.median(timed_s)
    lines = [
        f"{dtype}: an update takes {middle_s:.2f} s ({min(timed_s):.2f}–{max(timed_s):.2f}), {cpu_s:.2f} CPU "
        f"seconds; profiled, it took {profile.seconds:.2f} s",
        f"matmuls: {rate.flops / 1e9:.0f} GFLOP, alone {rate.seconds:.2f} s at {rate.gflops:.0f} GFLOP/s; the update "
        f"makes {rate.flops / middle_s / 1e9:.0f} GFLOP/s, {rate.seconds / middle_s:.0%} of that rate",
        "",
        f"| part | {' | '.join(KINDS)} | sum |",
        f"|{'---|' * (len(KINDS) + 2)}",
    ]
    for part in PARTS:
        cells = [profile.by_part.get((part, kind), 0.0) for kind in KINDS]
        lines.append(_table_line(part, [*cells, sum(cells)]))
    lines.append(_table_line("in no operation", [0.0] * len(KINDS) + [profile.unseen_s]))
    longest = sorted(profile.by_name.items(), key=lambda pair: -pair[1])[:top]
    return "\n".join([*lines, *(f"{seconds:8.3f} s  {name}" for name, seconds in longest)])


def _table_line(part: str, cells: Sequence[float]) -> str:
    return f"| {part} | {' | '.join(f'{seconds:.2f} s' for seconds in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--policy", default="smollm2", help="tiny, smollm2 or a model directory")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--case", type=Shape.parse, default=Shape(8, 40, 24), help="KxPROMPTxRESPONSE, as 8x40x24")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--top", type=int, default=0, help="also the operations that take longest")
    parser.add_argument("--plain-malloc", action="store_true", help="do not keep memory as a trainer of a run does")
    parser.add_argument("--plain-products", action="store_true", help="leave the kernels of products to torch")
    parser.add_argument("--json", type=Path, help="append a line with everything that was measured")
    args = parser.parse_args()
    keep_memory(plain=args.plain_malloc)
    if args.plain_products:
        os.environ[PLAIN] = "1"
    engine = load(args.policy, args.dtype, args.threads)
    bench = Bench(engine, args.token_budget)
    batch = make_batch(args.case, args.groups, engine.vocab_size, args.token_budget)
    for _ in range(2):
        bench.update(batch, "auto")
    before_s = process_time()
    timed_s = [bench.update(batch, "auto")[0] for _ in range(args.repetitions)]
    cpu_s = (process_time() - before_s) / args.repetitions
    profiles = [profiled(lambda: bench.update(batch, "auto")) for _ in range(PROFILES)]
    profile = min(profiles, key=lambda one: one.seconds)
    rate = rate_of(profile, getattr(torch, args.dtype))
    print(report(args.dtype, timed_s, cpu_s, profile, rate, args.top), flush=True)
    if args.json:
        record = {"case": asdict(args.case), "dtype": args.dtype, "threads": args.threads, "seconds": timed_s}
        record |= {
            "cpu_s": cpu_s,
            "profiled_s": profile.seconds,
            "matmul_gflops": rate.gflops,
            "matmul_alone_s": rate.seconds,
        }
        record |= {"parts": {f"{part} {kind}": seconds for (part, kind), seconds in profile.by_part.items()}}
        with args.json.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()

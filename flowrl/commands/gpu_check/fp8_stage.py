"""A stage about engines in fp8: an update results in the same weights and scales as a start with the same weights."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.commands.gpu_check.bench import Bench
from flowrl.commands.gpu_check.small_model import make_small_model
from flowrl.commands.gpu_check.weight_stages import READER, ModelSource, mean_gap, started, update
from flowrl.messages import Weights
from flowrl.nodes.engine_options import FP8
from flowrl.weights.publish import Publisher

if TYPE_CHECKING:
    from flowrl.nodes.generation.vllm_sampler import VllmSampler
    from flowrl.weights.receive import Receiver

METHODS = tuple(dict.fromkeys(FP8.values()))
"""By vLLM's names. On a CPU, only the first one is checked."""
UPDATED_LIMIT = 1e-3
"""Limit of the mean difference of a logprob between an updated engine and a fresh one, which hold the same bytes and
score one sequence at a time: a tenth of the difference between bfloat16 and float32. On a CPU the difference is 0.0; on
a GPU, kernels that are chosen by their speed may round in another order."""
ScoredLogprobs = list[list[float]]


def fp8(bench: Bench) -> None:
    """vLLM starts with other weights and takes the published ones, by every method."""
    old = make_small_model(bench.directory / "old", seed=1, dtype="bfloat16")
    new = make_small_model(bench.directory / "new", seed=2, dtype="bfloat16")
    publisher = Publisher(ModelSource(new, "cpu"), "policy", run_id=f"gpu-check-{os.getpid()}", probe_every=1)
    try:
        manifest = publisher.publish_version(0)
        assert manifest is not None
        asyncio.run(_compared(bench, old, new, manifest))
    finally:
        publisher.close()


async def _compared(bench: Bench, old: Path, new: Path, manifest: Weights) -> None:
    from flowrl.weights.receive import make_receiver

    taker = make_receiver((), READER, "gpu-check")
    try:
        plain, _ = await _examine_engine(bench, new, taker, manifest, "")
        bench.figure("bfloat16, gap to float32", f"{mean_gap(plain, manifest.probe_logprobs):.1e}")
        for method in METHODS if bench.on_gpu else METHODS[:1]:
            updated, held = await _examine_engine(bench, old, taker, manifest, method, update_first=True)
            fresh, wanted = await _examine_engine(bench, new, taker, manifest, method)
            different = sorted(name for name in held.keys() | wanted.keys() if held.get(name) != wanted.get(name))
            bench.require(not different, f"{method}: {len(different)} tensors differ after an update: {different[:3]}")
            bench.require(any("scale" in name for name in held), f"{method}: vLLM has not quantized anything")
            gap = mean_gap(updated, fresh)
            bench.require(
                gap <= UPDATED_LIMIT, f"{method}: after an update logprobs differ by {gap:.2e} from a fresh engine's"
            )
            bench.figure(f"{method}, updated to fresh", f"{gap:.1e}")
            bench.figure(f"{method}, gap to bfloat16", f"{mean_gap(updated, plain):.1e}")
    finally:
        taker.close()


async def _examine_engine(
    bench: Bench, path: Path, taker: Receiver, manifest: Weights, method: str, *, update_first: bool = False
) -> tuple[ScoredLogprobs, dict[str, Any]]:
    """(logprobs of the probe, checksum of every tensor of the first worker) of an engine with the model in `path`."""
    # CUDA graphs refer to weights and scales; they cost a minute per start, so only one method has them
    eager = None if method == METHODS[0] else True
    sampler = await started(bench, path, taker, dtype="bfloat16", quantization=method, enforce_eager=eager)
    try:
        if update_first:
            await update(bench, sampler, taker, manifest, method)
        return await sampler.score_sequences(manifest.probe_token_ids), await _checksums(sampler)
    finally:
        await asyncio.to_thread(sampler.close)


async def _checksums(sampler: VllmSampler) -> dict[str, Any]:
    found: list[dict[str, Any]] = await sampler._engine.collective_rpc("compute_weight_checksums")
    return found[0]

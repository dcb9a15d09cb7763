"""Stages about what vLLM samples: behavior logprobs, frequencies, versions amid an update, kinds of attention.

vLLM has two model runners, which differ in sampler and bookkeeping: v2 where Triton works, so on GPUs, v1 elsewhere.
Every stage here runs with either one. On a CPU, v2 needs Triton's interpreter (`Engine.runner`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flowrl.commands.gpu_check.bench import Bench
from flowrl.commands.gpu_check.pass_stages import BFLOAT16_LIMIT, load_model
from flowrl.commands.gpu_check.small_model import make_small_model, random_tokens
from flowrl.commands.gpu_check.training_stages import exact_products
from flowrl.commands.gpu_check.weight_stages import GAP_LIMIT, READER, ModelSource, started, update
from flowrl.messages import Float32, Int32
from flowrl.messages.sampling import Sampling
from flowrl.nodes.engine_options import Runner
from flowrl.nodes.generation.completions import Completion
from flowrl.training.model.row_layout import lay_out
from flowrl.weights.publish import Publisher

if TYPE_CHECKING:
    from flowrl.nodes.generation.vllm_sampler import VllmSampler
    from flowrl.weights.receive import Receiver

TRAINING = Sampling(temperature=0.7, max_tokens=24, ignore_eos=True)
"""Requests as training has them."""
HELD_OUT = replace(TRAINING, top_p=0.8)
LONG = replace(TRAINING, max_tokens=150)
"""Requests that outlast an update."""
PROMPT_LENGTHS = [5, 40, 17, 90, 33, 8, 64, 21]
BINS = 16
"""Number of sets of tokens whose frequencies are counted; each has about the same probability."""
LARGEST_Z = 5.0
"""Standard deviations of chance that the frequencies may differ by: chance exceeds it once in 3 million times."""
ATTENTIONS = {"FLASH_ATTN": "", "TRITON_ATTN": "triton", "FLASHINFER": "flashinfer"}
"""vLLM's kinds of attention on a GPU -> the package that each needs; FLASH_ATTN is part of vLLM."""


@dataclass(frozen=True)
class TrainerScores:
    """The model as a trainer computes it, on the stage's device."""

    path: Path
    bench: Bench

    def score(self, prompts: Sequence[Int32], found: Sequence[Completion], temperature: float) -> list[Float32]:
        """Logprobs of the sampled tokens, by response."""
        model = load_model(self.path, self.bench, "float32")
        tokens = [np.concatenate([prompt, one.token_ids]) for prompt, one in zip(prompts, found, strict=True)]
        masks = [np.arange(len(ids)) >= len(prompt) for ids, prompt in zip(tokens, prompts, strict=True)]
        rows = lay_out(tokens, masks, layout="padded", device=torch.device(self.bench.device))
        with torch.no_grad():
            logprobs_N = model(rows, temperature)[0].float().cpu().numpy()
        return np.split(logprobs_N, np.cumsum([len(one.token_ids) for one in found])[:-1])

    def next_probabilities(self, prompt: Int32, temperature: float) -> Float32:
        """The distribution of the token after the prompt."""
        model = ModelSource(self.path, self.bench.device).model
        with torch.no_grad():
            logits = model(torch.tensor(prompt[None], dtype=torch.long, device=self.bench.device)).logits[0, -1]
        probabilities: Float32 = (logits.float() / temperature).softmax(-1).cpu().numpy()
        return probabilities


def generation(bench: Bench, runner: Runner = "v1") -> None:
    """Sample with a seed, at temperature 0.7, whole and truncated; then update the weights amid running requests."""
    exact_products()
    old = make_small_model(bench.directory / "old", seed=1)
    new = make_small_model(bench.directory / "new", seed=2)
    publisher = Publisher(ModelSource(new, "cpu"), "policy", run_id=f"gpu-check-{os.getpid()}", probe_every=1)
    try:
        asyncio.run(_generation(bench, TrainerScores(old, bench), TrainerScores(new, bench), publisher, runner))
    finally:
        publisher.close()


def generation_v2(bench: Bench) -> None:
    """As `generation`, with vLLM's second model runner."""
    generation(bench, "v2")


@asynccontextmanager
async def _sampling(bench: Bench, path: Path, **engine: Any) -> AsyncIterator[tuple[VllmSampler, Receiver]]:
    """An engine with the model in `path`, whose tokens have version 0, and what receives its further versions."""
    from flowrl.weights.receive import make_receiver

    taker = make_receiver((), READER, "gpu-check")
    sampler = await started(bench, path, taker, **engine)
    try:
        await sampler.pause()
        await sampler.label_tokens(0)
        await sampler.resume()
        yield sampler, taker
    finally:
        await asyncio.to_thread(sampler.close)
        taker.close()


async def _generation(
    bench: Bench, old: TrainerScores, new: TrainerScores, publisher: Publisher, runner: Runner
) -> None:
    eager = None if bench.on_gpu else True
    async with _sampling(bench, old.path, runner=runner, enforce_eager=eager) as (sampler, taker):
        prompts = random_tokens(PROMPT_LENGTHS)
        await _compare_logprobs(bench, sampler, old, prompts)
        if runner == "v1" or bench.on_gpu:
            await _compare_truncated(bench, sampler, old, prompts)
        else:
            bench.figure("logprobs at top_p", "left out: Triton's interpreter cannot run vLLM's kernel of top_p")
        await _count_frequencies(bench, sampler, old, prompts[0])
        await _update_amid_requests(bench, sampler, old, new, prompts, taker, publisher)


async def _sample(
    sampler: VllmSampler, prompts: Sequence[Int32], sampling: Sampling, name: str, salt: str = "0"
) -> list[Completion]:
    requests = [
        sampler.complete(f"{name}-{number}", prompt.tolist(), sampling, seed=number, salt=salt)
        for number, prompt in enumerate(prompts)
    ]
    return list(await asyncio.gather(*requests))


async def _compare_logprobs(
    bench: Bench, sampler: VllmSampler, trainer: TrainerScores, prompts: Sequence[Int32]
) -> None:
    """The logprobs with which tokens were sampled are the trainer's."""
    found = await _sample(sampler, prompts, TRAINING, "training")
    expected = await asyncio.to_thread(trainer.score, prompts, found, TRAINING.temperature)
    gap = _mean_gap(found, expected)
    bench.figure("behavior logprobs to the trainer's", f"{gap:.1e}")
    bench.require(gap <= GAP_LIMIT, f"behavior logprobs differ from the trainer's by {gap:.2e} on average")

    again = await _sample(sampler, prompts, TRAINING, "again")
    same = np.mean([np.array_equal(a.token_ids, b.token_ids) for a, b in zip(found, again, strict=True)])
    bench.figure("responses that a seed repeats", f"{same:.0%}")


async def _compare_truncated(
    bench: Bench, sampler: VllmSampler, trainer: TrainerScores, prompts: Sequence[Int32]
) -> None:
    """With top_p, logprobs exceed a trainer's by -log of the mass that is kept, which lies between top_p and 1."""
    truncated = await _sample(sampler, prompts, HELD_OUT, "held-out")
    expected = await asyncio.to_thread(trainer.score, prompts, truncated, HELD_OUT.temperature)
    excess = np.concatenate([one.logprobs - wanted for one, wanted in zip(truncated, expected, strict=True)])
    most, slack = -np.log(HELD_OUT.top_p), 10 * GAP_LIMIT
    bench.figure("excess of logprobs at top_p 0.8", f"{excess.min():.3f} to {excess.max():.3f}, at most {most:.3f}")
    inside = bool((excess >= -slack).all() and (excess <= most + slack).all())
    bench.require(
        inside,
        f"logprobs of truncated sampling exceed the trainer's by {excess.min():.3g} to "
        f"{excess.max():.3g}, not by 0 to {most:.3g}",
    )


async def _count_frequencies(bench: Bench, sampler: VllmSampler, trainer: TrainerScores, prompt: Int32) -> None:
    """The first token of many seeded requests has the frequencies of the trainer's distribution (chi-squared test)."""
    count = 4096 if bench.on_gpu else 512
    one_token = replace(TRAINING, max_tokens=1)
    found = await _sample(sampler, [prompt] * count, one_token, "frequency")
    drawn = np.array([int(one.token_ids[0]) for one in found])
    p = (await asyncio.to_thread(trainer.next_probabilities, prompt, TRAINING.temperature)).astype(np.float64)
    order = np.argsort(-p)
    bin_of = np.empty(len(p), np.int64)
    bin_of[order] = np.minimum((np.cumsum(p[order]) - p[order] / 2) * BINS, BINS - 1).astype(np.int64)
    expected = np.bincount(bin_of, weights=p, minlength=BINS) * count
    observed = np.bincount(bin_of[drawn], minlength=BINS)
    filled = expected > 0
    degrees = int(filled.sum()) - 1
    squares = float((((observed - expected)[filled]) ** 2 / expected[filled]).sum())
    # Wilson and Hilferty: the cube root of a chi-squared number is close to normal
    z = ((squares / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    bench.figure(f"frequencies of {count} first tokens", f"chi-squared {squares:.1f}, {degrees} degrees of freedom")
    bench.require(
        z <= LARGEST_Z,
        f"vLLM samples tokens with other frequencies than their logprobs: chi-squared is "
        f"{squares:.1f} with {degrees} degrees of freedom",
    )


async def _update_amid_requests(
    bench: Bench,
    sampler: VllmSampler,
    old: TrainerScores,
    new: TrainerScores,
    prompts: Sequence[Int32],
    taker: Receiver,
    publisher: Publisher,
) -> None:
    """Pause with `keep`, load version 1, resume: no token is missing, each has its version, and what version 0 sampled
    has its logprobs. Requests that begin afterwards have those of version 1."""
    manifest = await asyncio.to_thread(publisher.publish_version, 1)
    assert manifest is not None
    running = asyncio.gather(_sample(sampler, prompts, LONG, "long"))
    await _sample(sampler, prompts[:1], replace(LONG, max_tokens=LONG.max_tokens // 8), "sign")  # the others run on
    await update(bench, sampler, taker, manifest, "update amid requests")
    (found,) = await running

    switches = [int(np.searchsorted(one.versions, 1)) for one in found]
    amid = sum(0 < at < LONG.max_tokens for at in switches)
    bench.figure("requests that an update crossed", f"{amid} of {len(found)}")
    bench.require(amid > 0, "no request was running during the update")
    whole = all(len(one.token_ids) == LONG.max_tokens and np.all(np.diff(one.versions) >= 0) for one in found)
    bench.require(whole, "requests that an update crossed lack tokens, or have versions out of order")
    before = [
        replace(one, token_ids=one.token_ids[:at], logprobs=one.logprobs[:at])
        for one, at in zip(found, switches, strict=True)
    ]
    expected = await asyncio.to_thread(old.score, prompts, before, LONG.temperature)
    gap = _mean_gap(before, expected)
    bench.require(gap <= GAP_LIMIT, f"tokens of version 0 differ from the trainer's version 0 by {gap:.2e}")

    after = await _sample(sampler, prompts, TRAINING, "after", salt="1")
    expected = await asyncio.to_thread(new.score, prompts, after, TRAINING.temperature)
    gap = _mean_gap(after, expected)
    bench.figure("logprobs after the update", f"{gap:.1e}")
    bench.require(gap <= GAP_LIMIT, f"after the update, logprobs differ from version 1's by {gap:.2e}")
    bench.require(all((one.versions == 1).all() for one in after), "tokens after the update do not have its version")


def _mean_gap(found: Sequence[Completion], expected: Sequence[Float32]) -> float:
    pairs = zip(found, expected, strict=True)
    return float(np.concatenate([np.abs(one.logprobs - wanted) for one, wanted in pairs]).mean())


def attention(bench: Bench) -> None:
    """Every kind of attention that is there samples in bfloat16 with logprobs close to a trainer's in float32."""
    exact_products()
    path = make_small_model(bench.directory / "model", seed=1, dtype="bfloat16")
    for kind, package in ATTENTIONS.items() if bench.on_gpu else [("CPU_ATTN", "")]:
        if package and find_spec(package) is None:
            bench.figure(kind, f"left out: {package} is not installed")
            continue
        gap = asyncio.run(_gap_of_attention(bench, path, kind))
        bench.figure(f"{kind}, bfloat16 to the trainer's float32", f"{gap:.1e}")
        bench.require(gap <= BFLOAT16_LIMIT, f"{kind}: behavior logprobs in bfloat16 differ by {gap:.2e} on average")


async def _gap_of_attention(bench: Bench, path: Path, kind: str) -> float:
    extra = (f"attention_backend={kind}",)
    async with _sampling(bench, path, dtype="bfloat16", extra=extra, enforce_eager=True) as (sampler, _):
        prompts = random_tokens(PROMPT_LENGTHS)
        found = await _sample(sampler, prompts, TRAINING, kind)
        expected = await asyncio.to_thread(TrainerScores(path, bench).score, prompts, found, TRAINING.temperature)
        return _mean_gap(found, expected)

"""fp8 on the real vLLM, on a CPU: what an update makes of weights and scales, and adapters on such a base.

vLLM computes fp8_per_channel there with kernels of torch. Engines are compared bit by bit.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flowrl.machine.cpu import cpu_flags
from flowrl.nodes.engine_options import CACHE_FLAGS, CacheDtype, Engine
from flowrl.weights.probe import FP8_TOLERANCE, probe_sequences
from tests.models.tiny_policy import ModelSource, make_policy, score
from tests.stack.live_generator import Live, checksums, difference, examined_afresh
from tests.stack.test_lora_stack import Trained, gang

__all__ = ["gang"]
pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(300)]
TRIES = range(10_000, 60_000, 10_000)
"""Numbers of the first prompts; on a machine without time for the test, whole responses arrive at once."""
CACHE: CacheDtype = "fp8" if cpu_flags() & CACHE_FLAGS else "auto"
"""On another CPU vLLM has no KV cache in fp8, and flowrl refuses it."""
FP8 = Engine(concurrency=32, max_model_len=256, quantization="fp8", dtype="bfloat16", kv_cache_dtype=CACHE)


def test_weights_and_scales_after_updates_are_those_of_a_fresh_engine(tmp_path: Path) -> None:
    """While prompts are answered; the tied head stays in bfloat16; with a KV cache in fp8 where the CPU has one."""
    live = Live(tmp_path / "policy", tied=True, engine=FP8)
    try:
        live.do(live.held(live.train()))
        crossed = any(live.do(crossing(live, first)) for first in TRIES)
        live.do(live.held(live.train()))
        found, held = live.scored(), live.do(checksums(live.generator._sampler))
        make_policy(tmp_path / "export", tied=True)
        live.model.save_pretrained(tmp_path / "export")
        assert difference(found, score(live.model, probe_sequences(99))) < FP8_TOLERANCE
    finally:
        live.close()
    assert crossed, "no update came in the middle of a response"
    assert asyncio.run(examined_afresh(tmp_path / "export", FP8)) == (found, held)
    scales = [name for name in held if name.endswith("weight_scale")]
    assert len(scales) == 2 * 4, "two layers of four matrices; the embedding has none"
    assert min(live.mismatches) > 0.02, "it samples from another policy than the trainer's"


async def crossing(live: Live, first: int) -> bool:
    """Whether a response has tokens of two versions, among the prompts from number `first` on."""
    before = len(live.sent)
    asked = await live.train_amid(first)
    samples = (await live.arrived(before + asked))[before:]
    return any(len(set(sample.versions[12:].tolist())) == 2 for sample in samples)


def test_adapters_are_served_on_a_base_in_fp8(gang: Any, tmp_path: Path) -> None:
    live = Trained(tmp_path / "base", gang, "adapter", engine=FP8)
    try:
        for _ in range(3):
            live.do(live.held(live.train()))
        base, trained = (model.score(probe_sequences(99)) for model in (ModelSource(live.model), live.engine))
        served, gaps = live.scored(), live.mismatches
        assert difference(served, trained) < difference(served, base) / 2, "it is the adapter that is served"
    finally:
        live.close()
    assert max(gaps) < 3 * gaps[0] < FP8_TOLERANCE

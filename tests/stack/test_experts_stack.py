"""A mixture of experts in vLLM on a CPU: after an update its experts are those of the trainer's version."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from flowrl.commands.gpu_check.bench import Bench
from flowrl.commands.gpu_check.small_model import random_tokens
from flowrl.commands.gpu_check.weight_stages import READER, ModelSource, mean_gap, started, update
from flowrl.graph.routes import WeightRoute, WeightTransport
from flowrl.messages import Weights
from flowrl.weights.publish import Publisher
from flowrl.weights.receive import SegmentReceiver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
LIMIT = 1e-5
SEQUENCES = [ids.tolist() for ids in random_tokens([30, 50, 20])]


def make_mixture(path: Path) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from flowrl.models.tokens.characters import character_tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": []}
    config = Qwen3MoeConfig(
        **sizes, **experts, num_key_value_heads=2, head_dim=32, vocab_size=320, max_position_embeddings=512
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


def test_experts_of_an_engine_on_a_cpu_follow_every_update(tmp_path: Path) -> None:
    """Through shared memory, and over tcp as on another machine. An update with equal weights changes no logprob."""
    path = make_mixture(tmp_path / "model")
    source = ModelSource(path, "cpu")
    routes = [WeightRoute(READER, WeightTransport.SHM), WeightRoute("generator/1", WeightTransport.TCP)]
    publisher = Publisher(source, "policy", run_id="experts", routes=routes, probe_every=1)

    def publish_changed(version: int) -> Weights:
        with torch.no_grad():
            for parameter in source.model.parameters():
                parameter.add_(0.02 * version * torch.randn_like(parameter))
        manifest = publisher.publish_version(version)
        assert manifest is not None
        return manifest

    async def compare() -> None:
        bench = Bench("cpu", 0, tmp_path)
        here, elsewhere = SegmentReceiver("experts"), SegmentReceiver("experts", machine="another")
        sampler = await started(bench, path, here)
        try:
            fresh = await sampler.score_sequences(SEQUENCES)
            assert mean_gap(fresh, source.score(SEQUENCES)) < LIMIT
            for version, receiver in enumerate((here, here, elsewhere)):
                manifest = await asyncio.to_thread(publish_changed, version)
                await update(bench, sampler, receiver, manifest, f"version {version}")
                found, wanted = await sampler.score_sequences(SEQUENCES), source.score(SEQUENCES)
                assert mean_gap(found, wanted) < LIMIT, version
                assert version > 0 or found == fresh
                assert version == 0 or mean_gap(found, fresh) > 0.01, "the versions are to differ"
        finally:
            await asyncio.to_thread(sampler.close)
            elsewhere.close()
            here.close()

    try:
        asyncio.run(compare())
    finally:
        publisher.close()

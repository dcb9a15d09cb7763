"""LoRA from the trainer to vLLM, as an adapter and merged: both sample from exactly what was trained.

A real one-rank engine trains the adapter, a real vLLM samples; logprobs are compared in float32, with
the trainer's and with PEFT's on what the trainer exported.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.messages import Sample
from flowrl.training.settings import LoRA, Sync, ZeroSettings
from flowrl.weights.probe import probe_sequences
from flowrl.weights.publish import Publisher
from tests.models.tiny_policy import score
from tests.nodes.generation.generator_rig import make_prompt
from tests.stack.live_generator import TOLERANCE, Live, difference
from tests.training.training_cases import CASES, make_batch

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(300)]


class Trained(Live):
    """A generator behind a trainer of adapters. Every version's adapter and merged weights are exported."""

    def __init__(self, path: Path, gang: Any, sync: Sync, **options: Any) -> None:
        self.gang = gang
        self.lora = LoRA(rank=4, sync=sync)
        super().__init__(path, tied=True, lora=self.lora, **options)

    def make_publisher(self) -> Publisher:
        from flowrl.training.engine.zero import ZeroEngine
        from flowrl.training.learner import Learner
        from flowrl.training.loss.policy_objective import PolicyObjective
        from flowrl.training.model.adapter import vllm_adapter_config

        self.engine = ZeroEngine(self.path, ZeroSettings(), self.gang, lora=self.lora)
        self.learner = Learner(self.engine, PolicyObjective())
        adapter = vllm_adapter_config(self.lora, self.engine.model.network) if self.lora.sync == "adapter" else None
        return Publisher(self.engine, "policy", run_id=f"lora-{self.lora.sync}", adapter=adapter, probe_every=1)

    def change_weights(self) -> None:
        from flowrl.training.loss.objective import loss_masks

        part = make_batch(self.version, CASES[0]).split(1)[0]
        masks = loss_masks(part.samples, part.mask_staleness, self.version)
        self.learner.train_piece(part, masks, self.version, lr=0.02)

    def train(self) -> int:
        version = super().train()
        self.engine.export_model(self.exported(version))
        return version

    def exported(self, version: int) -> Path:
        return self.path.parent / f"{self.path.name}-{version}"

    def of_version(self, version: int) -> Any:
        """The exported adapter on the base, by PEFT."""
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        return PeftModel.from_pretrained(base, str(self.exported(version) / "adapter"))


@pytest.fixture(scope="module")
def gang() -> Any:
    import torch

    from flowrl.training.engine.gang import Gang

    return Gang.meet_ranks(0, 1, "", torch.device("cpu"))


@pytest.fixture(scope="module", params=["adapter", "merged"])
def live(request: pytest.FixtureRequest, gang: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    live = Trained(tmp_path_factory.mktemp(request.param), gang, request.param)
    yield live
    live.close()


def assert_same(live: Trained, sample: Sample, model: Any) -> None:
    expected = score(model, [sample.token_ids])[0]
    count = sample.prompt_tokens
    assert difference([sample.behavior_logprobs[count:]], [expected[count - 1 :]]) <= TOLERANCE


def test_vllms_logprobs_are_the_trainers(live: Trained) -> None:
    base = score(live.model, probe_sequences(99))
    for _ in range(3):
        live.do(live.held(live.train()))
        trained = live.engine.score(probe_sequences(99))
        assert difference(live.scored(), trained) <= TOLERANCE
        assert difference(score(live.of_version(live.version), probe_sequences(99)), trained) <= TOLERANCE
    assert difference(base, trained) > 0.05, "an adapter of nothing would prove nothing"
    assert max(live.mismatches) <= TOLERANCE


def test_samples_carry_the_version_of_their_adapter(live: Trained) -> None:
    live.do(live.held(live.train()))
    for sample in live.samples([make_prompt(700 + i) for i in range(4)]):
        assert set(sample.versions[sample.policy_mask].tolist()) == {live.version}
        assert_same(live, sample, live.of_version(live.version))


def test_running_requests_keep_their_adapter(live: Trained) -> None:
    """While prompts are answered four adapters come; each sample is of one, and those gone leave vLLM."""
    if live.lora.sync == "merged":
        pytest.skip("merged weights replace those of running requests, as test_generator_stack shows")

    async def traffic() -> list[Sample]:
        before, asked = len(live.sent), 0
        for update in range(4):
            asked += await live.train_amid(8000 + 1000 * update)
        return (await live.arrived(before + asked))[before:]

    samples = live.do(traffic())
    versions = [set(sample.versions[sample.policy_mask].tolist()) for sample in samples]
    assert all(len(found) == 1 for found in versions)
    assert len(set.union(*versions)) >= 3
    for version in set.union(*versions):
        model = live.of_version(version)
        for sample in [s for s, found in zip(samples, versions, strict=True) if found == {version}][:6]:
            assert_same(live, sample, model)
    adapters: Any = live.generator._sampler._adapters
    live.do(adapters.wait_for_room())
    assert set(live.do(live.generator._sampler._engine.list_loras())) == {live.version + 1}


def test_the_export_is_the_policy_with_the_adapter_merged_in(live: Trained) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    live.do(live.held(live.train()))
    merged = AutoModelForCausalLM.from_pretrained(live.exported(live.version), dtype=torch.float32)
    trained = live.engine.score(probe_sequences(99))
    assert difference(score(merged, probe_sequences(99)), trained) <= TOLERANCE
    with live.engine.adapter_off():
        base = live.engine.score(probe_sequences(99))
    assert difference(base, score(live.model, probe_sequences(99))) <= TOLERANCE
    assert np.isfinite(trained[0]).all()


def test_logits_of_more_tokens_than_are_sampled_need_no_adapter() -> None:
    """As logprobs of prompts ask for, of a model whose output layer vLLM wraps: one of more than 32,000 tokens."""
    import torch
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from flowrl.weights.vllm_process.segment_engine import keep_heads_plain

    def add(wrapper: type[Any]) -> torch.Tensor:
        made: Any = wrapper.__new__(wrapper)
        made._sampler_indices, made.indices_len = torch.zeros(5, dtype=torch.long), [5] * 5
        logits = torch.ones(10, 64)
        made.add_lora_logits(logits, torch.ones(10, 8), torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 64, 4), 1.0)
        return logits

    with pytest.raises(RuntimeError, match="5"):
        add(PunicaWrapperCPU)
    plain = type("Plain", (PunicaWrapperCPU,), {})
    keep_heads_plain(plain)
    assert torch.equal(add(plain), torch.ones(10, 64))

"""The stages of `flowrl gpu-check` about generation: they hold with vLLM on a CPU, and they notice what is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowrl.cli import main
from flowrl.commands.gpu_check import generation_stages
from flowrl.commands.gpu_check import gpu_check as command
from flowrl.commands.gpu_check.bench import Bench, StageFailed
from flowrl.commands.gpu_check.generation_stages import LONG, TRAINING, TrainerScores
from flowrl.messages import Float32, Int32
from flowrl.messages.sampling import Sampling
from flowrl.nodes.generation.completions import Completion
from tests import warm

PROMPTS = [np.arange(5, 9, dtype=np.int32), np.arange(9, 12, dtype=np.int32)]


class KnownModel(TrainerScores):
    """The next token does not depend on those before it."""

    def next_probabilities(self, prompt: Int32, temperature: float) -> Float32:
        logits = np.linspace(0.0, 4.0, 40) / temperature
        return (np.exp(logits) / np.exp(logits).sum()).astype(np.float32)

    def score(self, prompts: Sequence[Int32], found: Sequence[Completion], temperature: float) -> list[Float32]:
        table = np.log(self.next_probabilities(prompts[0], temperature))
        return [table[one.token_ids].astype(np.float32) for one in found]


class DrawnSampler:
    """Answers as vLLM does, from KnownModel's distribution; `change` alters what it returns."""

    def __init__(self, model: KnownModel, change: Callable[[Completion], Completion], temperature: float) -> None:
        self.table = model.next_probabilities(PROMPTS[0], temperature).astype(np.float64)
        self.change = change

    async def complete(
        self, request_id: str, token_ids: Sequence[int], sampling: Sampling, *, seed: int, salt: str
    ) -> Completion:
        draw = np.random.default_rng(seed)
        ids = draw.choice(len(self.table), sampling.max_tokens, p=self.table / self.table.sum())
        logprobs = np.log(self.table)[ids]
        if sampling.top_p < 1:
            logprobs = logprobs - np.log(0.9)
        return self.change(Completion.copy_of(ids.tolist(), logprobs.tolist(), [0] * len(ids), "length"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench("cpu", 0, tmp_path)


def run_comparisons(
    bench: Bench,
    change: Callable[[Completion], Completion] = lambda one: one,
    *,
    drawn_at: float = TRAINING.temperature,
) -> None:
    model = KnownModel(bench.directory, bench)
    sampler: Any = DrawnSampler(model, change, drawn_at)

    async def compare() -> None:
        await generation_stages._count_frequencies(bench, sampler, model, PROMPTS[0])
        await generation_stages._compare_logprobs(bench, sampler, model, PROMPTS)
        await generation_stages._compare_truncated(bench, sampler, model, PROMPTS)

    asyncio.run(compare())


def test_a_sampler_that_does_what_it_says_passes(bench: Bench) -> None:
    run_comparisons(bench)
    assert bench.figures["responses that a seed repeats"] == "100%"
    assert float(bench.figures["behavior logprobs to the trainer's"]) < 1e-6


def test_a_sampler_with_another_temperature_is_noticed(bench: Bench) -> None:
    with pytest.raises(StageFailed, match="other frequencies than their logprobs: chi-squared is"):
        run_comparisons(bench, drawn_at=2.0)


@pytest.mark.parametrize(
    ("shift", "told"),
    [
        (0.01, "behavior logprobs differ from the trainer's by 1.00e-02 on average"),
        (-0.01, "behavior logprobs differ from the trainer's by 1.00e-02 on average"),
    ],
)
def test_logprobs_of_another_distribution_are_noticed(bench: Bench, shift: float, told: str) -> None:
    with pytest.raises(StageFailed, match=told):
        run_comparisons(bench, lambda one: replace(one, logprobs=one.logprobs + np.float32(shift)))


def test_logprobs_before_truncation_are_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_stages, "HELD_OUT", replace(TRAINING, top_p=0.95))
    with pytest.raises(StageFailed, match=r"logprobs of truncated sampling exceed the trainer's by 0\.105 to 0\.105"):
        run_comparisons(bench)


class UpdatedSampler(DrawnSampler):
    """Runs requests until an update; `tokens` of the second half have version 1, unless `labels` says otherwise."""

    def __init__(self, model: KnownModel, labels: Sequence[int]) -> None:
        super().__init__(model, lambda one: one, TRAINING.temperature)
        self.labels, self.updated, self.version = labels, asyncio.Event(), 0

    async def complete(
        self, request_id: str, token_ids: Sequence[int], sampling: Sampling, *, seed: int, salt: str = ""
    ) -> Completion:
        found = await super().complete(request_id, token_ids, sampling, seed=seed, salt=salt)
        if sampling.max_tokens < LONG.max_tokens:
            return replace(found, versions=np.full(len(found.token_ids), self.version, np.int32))
        await self.updated.wait()
        return replace(found, versions=np.array(self.labels, np.int32))


@pytest.mark.parametrize(
    ("labels", "version", "told"),
    [
        ([0] * 50 + [1] * 100, 1, None),
        ([0] * 150, 1, "no request was running during the update"),
        ([0] * 50 + [1] * 50 + [0] * 50, 1, "lack tokens, or have versions out of order"),
        ([0] * 50 + [1] * 100, 0, "tokens after the update do not have its version"),
    ],
)
def test_versions_amid_an_update_are_required(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, labels: Sequence[int], version: int, told: str | None
) -> None:
    model = KnownModel(bench.directory, bench)

    async def check() -> None:
        sampler = UpdatedSampler(model, labels)

        async def update(*_: Any) -> None:
            sampler.version = version
            sampler.updated.set()

        monkeypatch.setattr(generation_stages, "update", update)
        publisher: Any = SimpleNamespace(publish_version=lambda number: f"manifest {number}")
        given: Any = sampler
        await generation_stages._update_amid_requests(bench, given, model, model, PROMPTS, None, publisher)  # type: ignore[arg-type]

    if told is None:
        asyncio.run(check())
        assert bench.figures["requests that an update crossed"] == "2 of 2"
        return
    with pytest.raises(StageFailed, match=told):
        asyncio.run(check())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_vllm_samples_what_a_trainer_says_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "sys", SimpleNamespace(executable=warm.python()))
    status = main(["gpu-check", "--device", "cpu", "--out", str(tmp_path), "--only", "generation"])
    found = json.loads((tmp_path / "results.json").read_text())["stages"]["generation"]
    assert status == 0 and found["outcome"] == "ok", found
    assert found["figures"]["requests that an update crossed"] == "8 of 8"


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_attention_and_whole_runs_hold_on_a_cpu(tmp_path: Path) -> None:
    stages = ("attention", "whole-run", "adapter-run", "wide-run")
    status = main(["gpu-check", "--device", "cpu", "--out", str(tmp_path), "--only", *stages])
    found = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert status == 0 and {one["outcome"] for one in found.values()} == {"ok"}, found

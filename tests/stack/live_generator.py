"""A running generator on the real vLLM, on an event loop in a thread of its own as in a run; the trainer's model."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flowrl.messages import Prompt, Sample
from flowrl.messages.sampling import Sampling
from flowrl.models import Policy
from flowrl.nodes.engine_options import Engine
from flowrl.nodes.generation.generator import Generator
from flowrl.nodes.generation.vllm_sampler import VllmSampler
from flowrl.testing import NodeRecord, NodeRig
from flowrl.weights.probe import probe_sequences
from flowrl.weights.publish import Publisher
from tests import warm
from tests.models.tiny_policy import ModelSource, make_policy, perturb, score
from tests.nodes.generation.generator_rig import make_prompt

R = TypeVar("R")
CORE = (max(os.sched_getaffinity(0)),)
MOST = 96
"""Policy tokens of a sample: enough for updates and checkpoints to come in between."""
MOST_UNANSWERED = 64
"""Prompts at a time: more than an engine of these tests answers at once; few enough that a slow one answers in time."""
TOLERANCE = 1e-4
"""float32 logprobs of two implementations; a stale tied head is off by 0.05 and more."""


class Live:
    """A running generator, its trainer's model, and the loop they live on."""

    def __init__(
        self, path: Path, *, tied: bool, cold: bool = False, ends: tuple[int, ...] = (), **options: Any
    ) -> None:
        """`options` are further ones of the generator; `cold`: vLLM's engine is started as in a run (tests/warm);
        `ends` are the ids that the model's generation_config names as ends of a response."""
        self.path = path
        self.options = options
        self.model = make_policy(path, tied=tied)
        if ends:
            (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ends)}))
        self.publisher = self.make_publisher()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.version = -1
        if not cold:
            multiprocessing.set_executable(warm.python())  # of vLLM's engine
        self.do(self._start())

    def make_publisher(self) -> Publisher:
        return Publisher(ModelSource(self.model), "policy", run_id="stack", probe_every=1)

    def change_weights(self) -> None:
        perturb(self.model, 0.02, self.version)

    def do(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=150)

    async def _start(self) -> None:
        sampling = Sampling(max_tokens=MOST)
        engine = self.options.pop("engine", Engine(concurrency=32, max_model_len=256))
        self.generator = Generator(Policy(str(self.path)), sampling=sampling, engine=engine, **self.options)
        rig = NodeRig(self.generator, name="generator", cores=CORE, timeout_s=120)
        self.rig = await rig.__aenter__()
        self.record = self.rig.record

    def close(self) -> None:
        try:
            self.do(self._stop())
        finally:
            multiprocessing.set_executable(sys.executable)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.publisher.close()

    async def _stop(self) -> None:
        try:
            await self.rig.finished()
        finally:
            await self.rig.__aexit__(None, None, None)

    def train(self) -> int:
        """Change every weight, publish, and have the generator told; returns the version."""
        self.version += 1
        if self.version:
            self.change_weights()
        manifest = self.publisher.publish_version(self.version)
        self.loop.call_soon_threadsafe(self.rig.feed, "weights", manifest)
        return self.version

    async def train_amid(self, number: int) -> int:
        """Train while prompts come, from this number on, until the generator has the version, and some more.

        Returns how many. However slow a machine is, responses are in progress when the version changes, and those
        that are asked for then are soon there.
        """
        first, before, training = number, len(self.sent), asyncio.ensure_future(self._train_until_held())
        while not training.done():
            if number - first - (len(self.sent) - before) < MOST_UNANSWERED:
                self.rig.feed("prompts", make_prompt(number))
                number += 1
            await asyncio.sleep(0.02)  # the pace of the prompts
        await training
        self.rig.feed("prompts", *map(make_prompt, range(number, number + 8)))
        return number + 8 - first

    async def _train_until_held(self) -> None:
        await self.held(await asyncio.to_thread(self.train))

    async def held(self, version: int) -> None:
        """Returns when the generator has taken over `version` and checked the probe."""

        def checked(record: NodeRecord) -> bool:
            held = [held for _, _, held in record.events("holds")]
            return bool(held) and held[-1] >= version and len(self.mismatches) == len(held)

        await self.rig.until(checked, f"version {version}")

    @property
    def mismatches(self) -> list[float]:
        return self.record.gauges.get("logprob_mismatch", [])

    @property
    def sent(self) -> list[Sample]:
        return self.record.sent(self.generator.rollouts)

    async def arrived(self, count: int) -> list[Sample]:
        """Everything that was sent, when that is `count` samples."""
        await self.rig.until(lambda _: len(self.sent) >= count, f"sample {count}")
        return self.sent

    def samples(self, prompts: list[Prompt]) -> list[Sample]:
        async def all_of_them() -> list[Sample]:
            wanted = {prompt.sample_id for prompt in prompts}
            before = len(self.sent)
            self.rig.feed("prompts", *prompts)
            arrived = (await self.arrived(before + len(prompts)))[before:]
            return sorted((s for s in arrived if s.sample_id in wanted), key=lambda s: s.sample_id)

        return self.do(all_of_them())

    def scored(self) -> list[list[float]]:
        return self.do(self.generator._sampler.score_sequences(probe_sequences(99)))


def difference(left: Any, right: Any) -> float:
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(left, right, strict=True))


def assert_equal_to_a_fresh_engine(live: Live, export: Path) -> None:
    """Logprobs of fixed sequences: the updated engine's, a fresh engine's on the exported weights, transformers'."""
    make_policy(export, tied=live.model.config.tie_word_embeddings)
    live.model.save_pretrained(export)
    expected = asyncio.run(scored_afresh(export))
    found = live.scored()
    assert difference(found, expected) <= TOLERANCE
    assert difference(found, score(live.model, probe_sequences(99))) <= TOLERANCE


async def scored_afresh(path: Path) -> list[list[float]]:
    return (await examined_afresh(path, Engine(max_model_len=256)))[0]


async def examined_afresh(path: Path, engine: Engine) -> tuple[list[list[float]], Any]:
    """(logprobs of fixed sequences, checksums of every tensor) of a new engine with the model in `path`."""
    fresh = await asyncio.to_thread(VllmSampler.start, str(path), cores=CORE, engine=engine)
    try:
        return await fresh.score_sequences(probe_sequences(99)), await checksums(fresh)
    finally:
        await asyncio.to_thread(fresh.close)


async def checksums(sampler: VllmSampler) -> Any:
    """Of every parameter as the engine holds it, by name: what a layer makes of its weights included."""
    return (await sampler._engine.collective_rpc("compute_weight_checksums"))[0]


def update_under_traffic(live: Live) -> list[Sample]:
    """Four updates while 192 prompts are being answered, 32 at a time."""

    async def traffic() -> list[Sample]:
        before = len(live.sent)
        for number in range(192):
            live.rig.feed("prompts", make_prompt(number))
        for update in range(4):
            await live.arrived(before + 32 * (update + 1))
            await live.held(live.train())
        return (await live.arrived(before + 192))[before:]

    return live.do(traffic())

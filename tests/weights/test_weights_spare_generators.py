"""Draws that vLLM discards leave a request's generator where it was. The runner is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flowrl.weights.vllm_process.segment_engine import spare_discarded


def made(*discarded: bool) -> Runner:
    runner = Runner()
    runner.input_batch = SimpleNamespace(generators={}, num_reqs=len(discarded))
    runner.input_batch.generators.update({at: seeded(at) for at, _ in enumerate(discarded)})
    runner.discard_request_mask = SimpleNamespace(np=np.array([*discarded, True]))
    return runner


def seeded(seed: int) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def drawn(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))


class Runner:
    """Samples as vLLM does: every request draws, and a discarded draw is taken back."""

    input_batch: SimpleNamespace
    discard_request_mask: SimpleNamespace

    def sample_tokens(self, grammar: None) -> list[float]:
        found = [drawn(generator) for _, generator in sorted(self.input_batch.generators.items())]
        for at in np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs]):
            generator = self.input_batch.generators[at]
            generator.set_offset(generator.get_offset() - 4)
        return found


def test_without_it_a_discarded_draw_cannot_be_taken_back_on_a_cpu() -> None:
    with pytest.raises(RuntimeError, match="offset"):
        made(False, True).sample_tokens(None)


def test_a_discarded_draw_uses_up_nothing_of_its_request() -> None:
    class Spared(Runner):
        sample_tokens = Runner.sample_tokens

    spare_discarded(Spared)
    once = Spared.sample_tokens
    spare_discarded(Spared)
    assert Spared.sample_tokens is once
    runner = made(False, True, False)
    runner.__class__ = Spared
    own = dict(runner.input_batch.generators)
    first = runner.sample_tokens(None)
    assert runner.input_batch.generators == own
    assert [first[0], first[2]] == [drawn(seeded(0)), drawn(seeded(2))]
    assert drawn(own[1]) == drawn(seeded(1)), "it has drawn nothing yet"
    second = drawn(own[0])
    assert second != first[0] and second == [drawn(again) for again in [seeded(0)] for _ in range(2)][1]

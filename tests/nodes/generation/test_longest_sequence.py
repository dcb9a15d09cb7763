"""The longest sequence of a generator's engine: what a user says, or what those who ask it say, or the context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.graph.analysis.check import check
from flowrl.graph.analysis.numbers import longest_asked
from flowrl.graph.load import load_file
from flowrl.models import Policy
from flowrl.nodes import Generator, Sampling
from flowrl.nodes.engine_options import Engine
from flowrl.nodes.generation.vllm_processes import longest_sequence
from flowrl.weights.probe import PROBE_TOKENS

GRAPHS = Path(__file__).parents[3] / "graphs"


def test_the_longest_sequence_is_the_users_or_the_graphs_or_what_fits_the_cache() -> None:
    """vLLM's -1; without it an engine whose cache is smaller than the model's context does not start."""
    found = [
        Engine(max_model_len=9).vllm_arguments(on_gpu=True, longest=544),
        Engine().vllm_arguments(on_gpu=True, longest=544),
        Engine().vllm_arguments(on_gpu=False, longest=544),
        Engine().vllm_arguments(on_gpu=True),
        Engine().vllm_arguments(on_gpu=False),
    ]
    assert [one["max_model_len"] for one in found] == [9, 544, 544, -1, None]


@pytest.mark.parametrize(
    ("config", "asked", "expected"),
    [
        ({"max_position_embeddings": 2048}, 512, 544),
        ({"text_config": {"max_position_embeddings": 2048}}, 512, 544),
        ({"max_position_embeddings": 2048}, None, None),  # somebody sends prompts of any length
        ({"max_position_embeddings": 544}, 512, None),  # vLLM knows the context, and how the config scales it
        ({"max_position_embeddings": 100}, 512, None),
        ({"n_positions": 2048}, 512, None),
        ({"max_position_embeddings": 2048}, 3, 35),
        ({"max_position_embeddings": 2048}, 1, 33),
    ],
)
def test_the_longest_sequence_follows_from_prompt_and_response(
    tmp_path: Path, config: dict[str, Any], asked: int | None, expected: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert longest_sequence(tmp_path, asked, 32) == expected
    assert longest_sequence(tmp_path, 1, 1) in (PROBE_TOKENS + 1, None), "the probe has to fit"


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", [], 512),
        ("grpo", ["--evaluate", "0"], 512),
        ("grpo", ["--evaluate-max-prompt-tokens", "600"], 600),
        ("dapo", ["--max-prompt-tokens", "100"], 100),
        ("ppo", [], 512),
        ("rloo", [], 512),
        ("raft", [], 512),
        ("generate", [], 512),
        ("iterative_dpo", [], 512),
        ("agent_tools", ["--limits.tokens", "300"], 300),
        ("evaluate", ["--evaluate-max-prompt-tokens", "64"], 64),
        ("evaluate", [], None),
        ("dpo", [], None),  # its generator answers held-out prompts alone, which have no limit there
        ("dpo", ["--evaluate-max-prompt-tokens", "64"], 64),
    ],
)
def test_graphs_say_how_long_their_prompts_are(name: str, options: list[str], expected: int | None) -> None:
    file = load_file(GRAPHS / f"{name}.py")
    graph = file.build(file.parse(options))
    assert longest_asked(graph, "generator") == expected


@pytest.mark.parametrize(
    ("name", "options", "least"),
    [
        ("grpo", [], 512 + 32),
        ("grpo", ["--max-prompt-tokens", "100", "--max-tokens", "60", "--evaluate", "0"], 160),
        ("grpo", ["--evaluate-max-prompt-tokens", "600"], 632),
        ("evaluate", ["--evaluate-max-prompt-tokens", "64"], 96),
        ("dpo", ["--evaluate-max-prompt-tokens", "64"], 96),
        ("agent_tools", ["--limits.tokens", "300"], 300),  # its limit is that of context and reply together
    ],
)
def test_an_engine_that_takes_less_than_it_is_asked_is_refused(name: str, options: list[str], least: int) -> None:
    """It would cut answers off, and refuse prompts: a held-out one would then have no score."""

    def problems(most: int) -> tuple[str, ...]:
        file = load_file(GRAPHS / f"{name}.py")
        return check(file.build(file.parse([*options, "--engine.max-model-len", str(most)]))).problems

    found = problems(least - 1)
    assert found and all(f"raise --engine.max-model-len to {least}" in one for one in found)
    assert f"at most {least - 1} tokens" in found[0] and problems(least) == ()


def test_an_answer_to_a_held_out_prompt_may_be_longer_than_those_of_training() -> None:
    facts = Generator(Policy("tiny"), evaluation=Sampling(max_tokens=999), engine=Engine(max_model_len=64)).facts()
    assert (facts.longest_response, facts.longest_answer, facts.max_model_len) == (256, 999, 64)

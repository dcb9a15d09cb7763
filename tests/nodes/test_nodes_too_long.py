"""Conversations over the limit: dropped, an error, or without their beginning."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.models import Policy
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.nodes import (
    Demonstrations,
    DemonstrationSource,
    HeldOutBatch,
    PreferenceDataset,
    Preferences,
    PreferenceSource,
)
from flowrl.nodes.sources.row_checks import TooLong, open_chat, shorten_prompt
from flowrl.tasks import Task, load_demonstrations
from flowrl.testing import run_node


def test_the_beginning_is_cut_and_never_the_answer() -> None:
    ids = np.arange(10, dtype=np.int32)
    mask = np.array([0, 1, 1, 0, 0, 0, 0, 1, 1, 1], np.bool_)
    cut, kept = shorten_prompt(ids, mask, 6)
    assert cut.tolist() == [4, 5, 6, 7, 8, 9] and kept.tolist() == [False] * 3 + [True] * 3
    for most in (3, 2, 10, 12):
        assert shorten_prompt(ids, mask, most)[0] is ids


def rows(path: Path, **answers: str) -> Task:
    lines = [json.dumps({"prompt": f"{n} " + "x" * 40 * (n % 2), **answers}) for n in range(40)]
    path.write_text("\n".join(lines))
    return Task(str(path))


def trained(task: Task, too_long: TooLong, most: int) -> list[str]:
    source = DemonstrationSource(task, Policy("tiny"), epochs=1, max_tokens=most, part="all", too_long=too_long)
    asked = run_node(source, name="prompts").sent("prompts")
    node = Demonstrations(task, Policy("tiny"), max_tokens=most, part="all", too_long=too_long)
    tokenizer = character_tokenizer()
    return [tokenizer.decode(group.samples[0].token_ids) for group in run_node(node, {"prompts": asked}).sent("groups")]


def test_demonstrations_are_dropped_or_lose_their_beginning(tmp_path: Path) -> None:
    task = rows(tmp_path / "rows.jsonl", answer="yes")
    assert len(trained(task, "drop", 20)) == 20
    cut = trained(task, "truncate", 20)
    assert len(cut) == 40 and all(text.endswith("<|assistant|>yes<|end|>") for text in cut)
    assert {
        len(character_tokenizer()(text, add_special_tokens=False)["input_ids"]) for text in cut if "xx" in text
    } == {20}
    with pytest.raises(Exception, match=r"20 of 40 conversations .* are longer than max_tokens = 20, the longest has"):
        trained(task, "error", 20)


def test_both_completions_of_a_pair_lose_the_same_part_of_their_prompt(tmp_path: Path) -> None:
    task = rows(tmp_path / "rows.jsonl", chosen="good", rejected="bad one")
    data = Preferences(task, Policy("tiny"), max_tokens=30, too_long="truncate")
    asked = run_node(PreferenceSource(data, epochs=1), name="prompts").sent("prompts")
    groups = run_node(PreferenceDataset(data), {"prompts": asked}).sent("groups")
    assert len(groups) == len(asked) // 2
    tokenizer = character_tokenizer()
    for group in groups:
        chosen, rejected = (tokenizer.decode(s.token_ids[: s.prompt_tokens]) for s in group.samples)
        assert chosen == rejected and max(len(s.token_ids) for s in group.samples) <= 30
        assert [tokenizer.decode(s.token_ids[s.policy_mask]) for s in group.samples] == [
            "good<|end|>",
            "bad one<|end|>",
        ]


def test_a_long_pair_is_an_error_before_the_run_if_asked_for(tmp_path: Path) -> None:
    data = Preferences(
        rows(tmp_path / "rows.jsonl", chosen="a", rejected="b"), Policy("tiny"), max_tokens=20, too_long="error"
    )
    with pytest.raises(ConfigError, match=r"conversations of .* are longer than max_tokens = 20"):
        PreferenceDataset(data).refuse_long(open_chat(data.task, data.policy))


def test_the_loss_is_measured_on_rows_that_are_not_trained(tmp_path: Path) -> None:
    task = rows(tmp_path / "rows.jsonl", answer="yes")
    data = Demonstrations(task, Policy("tiny"), max_tokens=20)
    (batch,) = run_node(HeldOutBatch(data), name="held_out").sent("batch")
    source = DemonstrationSource(task, Policy("tiny"), epochs=1)
    asked = {prompt.prompt_id for prompt in run_node(source, name="prompts").sent("prompts")}
    held_out = load_demonstrations(task).held_out
    assert {sample.prompt_id for sample in batch.samples} <= {row.prompt_id for row in held_out}
    assert not {sample.prompt_id for sample in batch.samples} & asked
    assert 0 < len(batch.samples) < len(held_out), "the longest are left out"
    tokenizer = character_tokenizer()
    assert {tokenizer.decode(s.token_ids[s.policy_mask]) for s in batch.samples} == {"yes<|end|>"}
    assert batch.num_tokens == 4 * len(batch.samples)


def test_a_source_that_trains_all_rows_holds_none_out() -> None:
    whole = Demonstrations(Task("arithmetic"), Policy("tiny"), part="all")
    assert "set part='train', so that rows are held out" in HeldOutBatch(whole).check(None)[0]

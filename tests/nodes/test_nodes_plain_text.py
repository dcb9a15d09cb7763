"""Texts without roles: every token is trained once, from its own text or from what precedes it in the stream."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import ConfigError
from flowrl.graph.load import load_file
from flowrl.models import Policy
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.models.tokens.text_tokens import split_pieces, text_tokens
from flowrl.nodes import HeldOutBatch, TextDataset, Texts, TextSource
from flowrl.nodes.sources.plain_text import CutBy
from flowrl.tasks import Task, load_rows, load_texts
from flowrl.testing import run_node

TEXTS = [f"text {n}: " + "abc" * n for n in range(40)]
END = character_tokenizer().eos_token_id


def corpus(tmp_path: Path, texts: list[Any] = TEXTS, column: str = "text") -> Task:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({column: text, "id": n}) + "\n" for n, text in enumerate(texts)))
    return Task(str(path) if column == "text" else f"{path}:text={column}")


def trained(task: Task, cut: CutBy, most: int, part: Any = "all") -> list[Any]:
    """The samples of one epoch, in the order in which they were sent."""
    texts = Texts(task, Policy("tiny"), max_tokens=most, cut=cut, part=part)
    asked = run_node(TextSource(texts, epochs=1), name="prompts").sent("prompts")
    return [group.samples[0] for group in run_node(TextDataset(texts), {"prompts": asked}).sent("groups")]


def targets(samples: list[Any]) -> list[int]:
    return sorted(int(one) for sample in samples for one in sample.token_ids[sample.policy_mask])


@given(st.integers(0, 200), st.integers(2, 20))
def test_pieces_predict_every_token_but_the_first_once(length: int, most: int) -> None:
    found = list(split_pieces(length, most))
    assert [one for start, stop in found for one in range(start + 1, stop)] == list(range(1, length))
    assert all(2 <= stop - start <= most for start, stop in found)
    assert all(later[0] == earlier[1] - 1 for earlier, later in itertools.pairwise(found))


def test_split_keeps_texts_apart_and_trains_every_token_but_their_first(tmp_path: Path) -> None:
    tokens = list(text_tokens(character_tokenizer(), TEXTS))
    assert all(text[-1] == END and END not in text[:-1] for text in tokens)
    samples = trained(corpus(tmp_path), "split", 16)
    assert targets(samples) == sorted(int(one) for text in tokens for one in text[1:])
    known = {text.tobytes(): number for number, text in enumerate(tokens)}
    for sample in samples:
        inside = [number for text, number in known.items() if sample.token_ids.tobytes() in text]
        assert inside and len(sample.token_ids) <= 16 and END not in sample.token_ids[:-1]
        assert not sample.policy_mask[0] and sample.policy_mask[1:].all() and sample.prompt_tokens == 1


def test_wrapped_fills_every_sequence_and_trains_every_token_but_the_first_of_all(tmp_path: Path) -> None:
    task = corpus(tmp_path)
    found = load_texts(task, whole=True)
    stream = np.concatenate([*text_tokens(character_tokenizer(), [r.prompt for r in (*found.train, *found.held_out)])])
    samples = trained(task, "wrapped", 64)
    assert targets(samples) == sorted(int(one) for one in stream[1:])
    assert sorted(len(sample.token_ids) for sample in samples)[1:] == [64] * (len(samples) - 1)
    assert len(samples) == -(-(len(stream) - 1) // 63)


def test_the_order_is_shuffled_and_repeated_texts_stay(tmp_path: Path) -> None:
    samples = trained(corpus(tmp_path, ["same text"] * 9 + TEXTS), "split", 512)
    assert sum(sample.response_text.startswith("ame text") for sample in samples) == 9
    assert len({sample.prompt_id for sample in samples}) == len(samples) == 49
    assert [sample.response_text for sample in samples] != sorted(sample.response_text for sample in samples)


def test_held_out_texts_are_measured_and_not_trained(tmp_path: Path) -> None:
    task = corpus(tmp_path)
    data = TextDataset(Texts(task, Policy("tiny"), max_tokens=64))
    (batch,) = run_node(HeldOutBatch(data), name="held_out").sent("batch")
    held_out = load_texts(task).held_out
    assert held_out and targets(list(batch.samples)) == sorted(
        int(one) for text in text_tokens(character_tokenizer(), [row.prompt for row in held_out]) for one in text[1:]
    )
    assert not {s.token_ids.tobytes() for s in batch.samples} & {
        s.token_ids.tobytes() for s in trained(task, "split", 64, "train")
    }
    (tmp_path / "one").mkdir()
    one = corpus(tmp_path / "one", ["one"])
    with pytest.raises(ConfigError, match=r"has no held-out text|has no training rows"):
        TextDataset(Texts(one, Policy("tiny"))).require_held_out()


def test_a_txt_file_is_one_text_and_no_row_of_a_directory_with_others(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"{name} one\n\n{name} two\n")
    found = load_texts(Task(f"{tmp_path}/*.txt"), whole=True)
    assert sorted(row.prompt[:1] for row in (*found.train, *found.held_out)) == ["a", "b", "c"]
    assert load_texts(Task(str(tmp_path)), whole=True) == found
    (tmp_path / "train.jsonl").write_text('{"prompt": "q"}\n')
    assert [row.prompt for row in load_rows(Task(str(tmp_path)), whole=True).train] == ["q"]
    (tmp_path / "bad.txt").write_bytes(b"one\ntwo \xe9\n")
    with pytest.raises(ConfigError, match=r"bad.txt:2: the byte 0xe9 at position 4 is not UTF-8"):
        load_texts(Task(str(tmp_path / "bad.txt")), whole=True)


def test_what_holds_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"texts.jsonl:3: the column 'text' is '7'; it needs text"):
        load_texts(corpus(tmp_path, ["a", "b", 7]))
    with pytest.raises(ConfigError, match=r"texts.jsonl:1: the column 'text' is missing \(there are body, id\)"):
        load_texts(Task(str(corpus(tmp_path, ["a"], "body").path)))
    found = load_texts(corpus(tmp_path, ["a", " ", "", *TEXTS], "body"), whole=True)
    assert len(found.train) + len(found.held_out) == 41 and len(found.skipped) == 2
    assert found.skipped[0].endswith("texts.jsonl:2: the text is empty")
    for name, says in (
        ("arithmetic", "has no texts: it is neither a file"),
        (f"0.5*{tmp_path}/texts.jsonl + 0.5*arithmetic", "is a mixture"),
        (f"{tmp_path}/texts.jsonl:prompt=body", "has no option 'prompt'; it has text, split, config, malformed, rows"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_texts(Task(name))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--too-long", "truncate"], "too_long is for conversations"),
        (["--assistant", "last"], "assistant is for conversations"),
        (["--task.template", "Q: {prompt}"], "task.template is for conversations"),
        (["--evaluate", "8"], "texts have no prompts to ask; name some with --evaluate-task"),
    ],
)
def test_options_of_conversations_are_refused(options: list[str], says: str, tmp_path: Path) -> None:
    file = load_file("sft")
    texts = ["--pretrain-mode", "split", "--task", corpus(tmp_path).name]
    with pytest.raises(ConfigError, match=says):
        file.build(file.parse([*texts, *options]))
    assert file.build(file.parse(texts))

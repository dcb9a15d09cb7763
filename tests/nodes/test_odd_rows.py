"""Odd texts in every kind of data and with every chat template: trained as a rollout would see them, or named.

What is expected is made by a plain renderer: the template's text of the prompt with its generation prompt, and what
the template writes behind it with the answer, each tokenized alone.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.messages import Bool, Int32
from flowrl.models import Policy
from flowrl.models.tokens.chat import Chat, Unrendered
from flowrl.nodes import Demonstrations, Preferences, StepDataset
from flowrl.nodes.sources.preferences import Renderer
from flowrl.nodes.sources.row_checks import RowTexts, prompt_texts
from flowrl.tasks import Row, Rows, Task, load_demonstrations, load_preferences, load_rows
from tests.agents.chat_templates import SPECIAL_TOKEN, merging, templates, with_template
from tests.models.test_models_chat import merging as merging_newlines
from tests.nodes.odd_rows import NUM_ROWS, odd_texts

ANY = Policy("any")
Tokens = tuple[Int32, Bool]
KINDS = ("sft", "dpo", "kto", "reward_model", "grpo", "process_reward_model")


@dataclass(frozen=True)
class Seen:
    """What a kind of data makes of one row: the answers to its prompt, as they are trained."""

    texts: RowTexts
    made: Callable[[], list[Tokens]]
    scored: bool = False


@functools.cache
def tokenizer_with(name: str, newlines: bool) -> Any:
    """A tokenizer with a template of TRL's wheel; `newlines`: one that splits texts as Qwen's and Llama's do."""
    return with_template(merging_newlines(None) if newlines else merging(), templates()[name])


def control(tokenizer: Any) -> list[str]:
    """The end token of texts, and special tokens that the template names."""
    return [str(tokenizer.eos_token), *sorted(set(SPECIAL_TOKEN.findall(str(tokenizer.chat_template))))]


def rows_of(kind: str, task: Task) -> Rows:
    if kind in ("dpo", "reward_model"):
        return load_preferences(task, "pairs")
    if kind == "kto":
        return load_preferences(task, "labelled")
    return load_rows(task, whole=True) if kind == "grpo" else load_demonstrations(task, whole=True)


def record(kind: str, number: int, texts: list[str]) -> dict[str, Any]:
    """A row whose prompt is odd too; its completions are two of the texts."""
    text, other = texts[number], texts[(number + 1) % len(texts)]
    columns: dict[str, dict[str, Any]] = {
        "sft": {"answer": text},
        "dpo": {"chosen": text, "rejected": other},
        "kto": {"completion": text, "label": bool(number % 2)},
        "reward_model": {"chosen": text, "rejected": other},
        "grpo": {},
        "process_reward_model": {"steps": [text, other], "labels": [1, 0]},
    }
    short = text[:200]
    return {"prompt": f"{short}{number}{short}", **columns[kind]}


def seen(kind: str, task: Task, rows: Rows, chat: Chat) -> Iterator[tuple[Row, Seen]]:
    """Every row with what the nodes of the graph make of it."""
    every = [*rows.train, *rows.held_out]
    data = Preferences(task, ANY, "labelled" if kind == "kto" else "pairs", scored=kind == "reward_model")
    renderer = Renderer(data, chat, every if kind in ("dpo", "kto", "reward_model") else [])
    demonstrations, steps = Demonstrations(task, ANY, part="all"), StepDataset(task, ANY, separator="\n")

    def made(row: Row) -> list[Tokens]:
        if kind == "sft":
            return [demonstrations.render_row(chat, row)]
        if kind == "grpo":
            return [_whole(chat.encode_prompt(row.turns)[1])]
        if kind == "process_reward_model":
            return [_prompt_of(steps.make_sample(chat, row, sample_id="", group_id="").token_ids, chat, row)]
        return [(one.token_ids, one.policy_mask) for one in renderer.render_row(row.prompt_id)]

    texts = {"sft": demonstrations.row_texts, "grpo": prompt_texts, "process_reward_model": steps.row_texts}
    for row in every:
        yield row, Seen(texts.get(kind, data.row_texts)(row), functools.partial(made, row), data.scored)


def _whole(ids: Int32) -> Tokens:
    return ids, np.zeros(ids.size, np.bool_)


def _prompt_of(ids: Int32, chat: Chat, row: Row) -> Tokens:
    """The prompt of a sample, of which the rest is checked here: its steps, each alone, and the end token."""
    *others, last = row.columns["steps"]
    told = [*others, plainly_without(last, Plain(chat.tokenizer).ends)]
    steps = [chat.tokenizer(step + "\n", add_special_tokens=False)["input_ids"] for step in told]
    rest = [*(one for step in steps for one in step), chat.tokenizer.eos_token_id]
    assert ids[ids.size - len(rest) :].tolist() == rest
    return _whole(ids[: ids.size - len(rest)])


def plainly_without(text: str, ends: list[str]) -> str:
    """The text without end tokens at its end."""
    while end := next((end for end in ends if text.rstrip().endswith(end)), ""):
        text = text.rstrip()[: -len(end)]
    return text


class Plain:
    """The plain renderer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.specials = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        try:
            self.parts = "probe" not in self._text([{"role": "user", "content": "probe"}], prompt=True)
        except Exception:  # templates of parts
            self.parts = True
        whole = self.text([{"role": "user", "content": "q"}, {"role": "assistant", "content": "probe"}]).rstrip()
        tail = whole.rpartition("probe")[2]
        self.end = max((one for one in self.specials if tail.endswith(one)), key=len, default="")
        self.ends = [end for end in (str(tokenizer.eos_token), self.end) if end]

    def text(self, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
        if self.parts:
            messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
        return self._text(messages, prompt=prompt)

    def _text(self, messages: list[dict[str, Any]], *, prompt: bool) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt(self, turns: Any) -> list[int]:
        return self.ids(self.text([dict(turn) for turn in turns], prompt=True))

    def ends_within(self, steps: tuple[str, ...]) -> bool:
        """Whether an end token is in the steps of a response but at their end."""
        told = [*steps[:-1], *(plainly_without(step, self.ends) for step in steps[-1:])]
        return any(end in step for end in self.ends for step in told)

    def answer(self, turns: Any, answer: str, *, scored: bool) -> list[int] | str:
        """The ids of the answer, or a part of the reason for which the row cannot be used."""
        answer = plainly_without(answer, self.ends)
        if any(end in answer for end in self.ends):
            return "end token"
        turns = [dict(turn) for turn in turns]
        before = self.text(turns, prompt=True)
        whole = self.text([*turns, {"role": "assistant", "content": answer}])
        if not whole.startswith(before):
            return "rewrites"
        written = whole[len(before) :]
        if written.rstrip().endswith(tuple(self.specials)):
            written = written.rstrip()
        rest = plainly_without(written, self.ends)
        if not written or (answer.strip() and not rest.strip()):
            return "nothing of the answer"
        ids = self.ids(written)
        eos = self.tokenizer.eos_token_id
        return [*(one for one in ids if one != eos), eos] if scored else ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(templates()))
def test_odd_rows_are_trained_as_rollouts_see_them_or_named(name: str, kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(name, newlines=sum(map(ord, name)) % 2 == 0)
    plain, chat = Plain(tokenizer), Chat(tokenizer)
    texts = odd_texts(control(tokenizer))
    assert len(texts) == NUM_ROWS and any(len(text) >= 99_000 for text in texts)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(record(kind, n, texts))}\n" for n in range(NUM_ROWS)))
    task = Task(f"{path}:malformed=skip")
    rows = rows_of(kind, task)
    assert all(why.startswith(f"{path}:") for why in rows.skipped)
    trained = named = 0
    every = [*seen(kind, task, rows, chat)]
    others = kind != "kto" or sum(not one.texts.why_unrendered(chat) for _, one in every) > 1
    for row, one in every:
        assert row.place.startswith(f"{path}:")
        expected = [plain.answer(row.turns, str(reply), scored=one.scored) for reply in one.texts.replies]
        reasons = [reason for reason in expected if isinstance(reason, str)]
        reasons += ["end token"] * plain.ends_within(one.texts.steps)
        problem = one.texts.why_unrendered(chat)
        if reasons:
            assert reasons[0] in problem, (row.place, reasons, problem)
            with pytest.raises(Unrendered):
                one.made()
            named += 1
            continue
        assert not problem, (row.place, problem)
        if kind == "kto" and not others:  # KTO needs the completion of another row too
            with pytest.raises(Unrendered, match="no other row has a completion"):
                one.made()
            named += 1
            continue
        made, prompt = one.made(), plain.prompt(row.turns)
        for (ids, mask), answer in zip(made, expected or [[]], strict=True):
            assert ids.tolist() == [*prompt, *answer], row.place
            assert mask.tolist() == [False] * len(prompt) + [True] * len(answer), row.place
        trained += 1
    assert trained + named + len(rows.skipped) == NUM_ROWS
    plainly = plain.answer([{"role": "user", "content": "q"}], "Hello", scored=False)
    assert trained > NUM_ROWS / 2 or (plainly == "rewrites" and kind not in ("grpo", "process_reward_model"))

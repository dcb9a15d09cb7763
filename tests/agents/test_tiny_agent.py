"""`tiny_agent`: its tokenizer, its way with calls, its traces and what it can do; `tiny` stays as it is."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.agents import ChatTemplate, Conversation, examine
from flowrl.errors import ConfigError
from flowrl.machine.cache import RECIPE
from flowrl.models import Policy, check_model, load_tokenizer, resolve
from flowrl.models.built_in_models import CALCULATOR, IGNORED, ToolTraces, play_episode
from flowrl.models.tokens.characters import TOOL_TOKENS, character_tokenizer, character_vocabulary, tool_tokenizer
from flowrl.models.tokens.vocabulary import read_vocabulary, vocabulary_problem
from flowrl.tasks import Row, Task, load_rows
from flowrl.tasks.toy_tasks import careless_answer
from tests.agents.tool_episodes import calculator, play

TASK = Task("arithmetic:min_value=30")
CONTENT = st.text(st.characters(codec="utf-8")).filter(lambda text: "<|" not in text)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | CONTENT, lambda inner: st.lists(inner) | st.dictionaries(CONTENT, inner)
)
CALL = st.tuples(st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True), st.dictionaries(CONTENT, VALUE))


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the directories that are made in an empty cache, without what makes them."""
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    names: list[str] = []

    def make(final: Path, *_: object) -> None:
        names.append(final.name)
        final.mkdir()
        (final / RECIPE).touch()

    monkeypatch.setattr("flowrl.machine.cache._make_directory", make)
    return names


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tool_tokenizer()


def replies(tokenizer: Any, messages: Sequence[Any]) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tools=[CALCULATOR], tokenize=False))


def test_tiny_has_the_ids_that_it_always_had() -> None:
    text = "<|system|>Az<|end|><|user|>7+5=\n \u00e9<|end|><|assistant|>12<|end|><|pad|>"
    expected = [2, 37, 94, 1, 3, 27, 15, 25, 33, 203, 225, 132, 107, 1, 4, 21, 22, 1, 0]
    assert character_tokenizer()(text, add_special_tokens=False)["input_ids"] == expected
    described = json.dumps(character_vocabulary(), sort_keys=True)
    assert hashlib.blake2b(described.encode(), digest_size=8).hexdigest() == "cc587c3f6b1ba717"


def test_tiny_and_its_teacher_are_found_in_a_cache_that_was_made_before(made: list[str]) -> None:
    for name in ("tiny", "tiny_teacher"):
        for task in (None, Task(), Task("arithmetic:max_value=9", system_prompt="be brief")):
            resolve(Policy(name, task=task))
    students = ["tiny-6e08c932e120", "tiny-a5becf1d5ede", "tiny-eaddf3cf53fc"]
    assert made == [*students, "tiny_teacher-6e08c932e120", "tiny_teacher-d42b45515d8e", "tiny_teacher-4f6a19e7d159"]


def test_a_recipe_is_made_once(made: list[str]) -> None:
    found = [resolve(Policy("tiny_agent", task=task)) for task in (TASK, Task(), None, TASK)]
    assert [Path(one).name for one in found[:3]] == made and len(set(made)) == 3
    assert found[0] == found[3] and made[2] != "tiny_agent-6e08c932e120"


def test_tool_tokens_come_after_all_others(tokenizer: Any) -> None:
    mine = tokenizer.get_vocab()
    assert character_vocabulary().items() < mine.items()
    assert {token: mine[token] for token in TOOL_TOKENS} == {"<|tools|>": 261, "<|call|>": 262, "<|tool|>": 263}
    assert read_vocabulary(Policy("tiny_agent")) == mine and read_vocabulary(Policy("tiny")) == character_vocabulary()
    assert "different tokenizers" in str(vocabulary_problem(Policy("tiny_agent"), Policy("tiny_teacher")))


def test_an_episode_takes_few_characters(tokenizer: Any) -> None:
    row = Row.ask("12+34=", answer="46")
    answer = {"role": "tool", "name": "calculator", "content": "46"}
    assert replies(tokenizer, [*play_episode(row, True)[0][:-1], answer, {"role": "assistant", "content": "46"}]) == (
        "<|tools|>calculator<|end|><|user|>12+34=<|end|>"
        '<|assistant|><|call|>calculator{"expression":"12+34"}<|end|><|tool|>46<|end|><|assistant|>46<|end|>'
    )


def test_preflight_has_no_complaint_before_and_after_saving(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    for one in (tokenizer, load_tokenizer(tmp_path)):
        assert type(one).__name__ == "Qwen2Tokenizer"
        found = examine(one, [CALCULATOR])
        assert (found.rewrites, found.no_tools, found.no_parsing) == ((), "", "")


@given(content=CONTENT, calls=st.lists(CALL, max_size=3), history=CONTENT)
def test_a_reply_is_parsed_into_the_message_that_it_was(tokenizer: Any, content: str, calls: Any, history: str) -> None:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    template = ChatTemplate(tokenizer, [CALCULATOR])
    before = [{"role": "user", "content": history}]
    context, whole = template.render_text(before), replies(tokenizer, [*before, message])
    assert whole.startswith(context)
    ids = template.render_ids(whole[len(context) :])
    assert tokenizer.parse_response(template.decode(ids), prefix=context) == message
    assert tokenizer.parse_response(ids.tolist(), prefix=template.render_ids(context).tolist()) == message


@pytest.mark.parametrize("reply", ['calculator{"expression":', "<|end|>", "calculator[1]<|end|>", 'a{"b":1} 2<|end|>'])
def test_a_malformed_call_is_no_message(tokenizer: Any, reply: str) -> None:
    with pytest.raises(ValueError, match="could not parse"):
        tokenizer.parse_response(f"<|call|>{reply}", prefix="", tools=[CALCULATOR])


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("system_prompt", ["", "be brief"])
@given(a=st.integers(0, 999), b=st.integers(0, 999))
def test_a_trace_has_the_tokens_of_a_conversation(
    tokenizer: Any, system_prompt: str, calls: bool, a: int, b: int
) -> None:
    row = Row.ask(f"{a}+{b}=", answer=str(a + b))
    ids, labels = ToolTraces(tokenizer, Task(system_prompt=system_prompt), 0.5).make_trace(row, calls=calls)
    (sequence,) = conversation_of(tokenizer, row, system_prompt, calls).sequences()
    assert sequence.token_ids.tolist() == ids
    assert np.where(sequence.policy_mask, sequence.token_ids, IGNORED).tolist() == labels


def conversation_of(tokenizer: Any, row: Row, system_prompt: str, calls: bool) -> Conversation:
    """What a policy and an environment make together."""
    conversation = Conversation(ChatTemplate(tokenizer, [CALCULATOR]))

    def say(text: str) -> None:
        conversation.context()
        ids = conversation.template.render_ids(f"{text}<|end|>")
        message = tokenizer.parse_response(ids.tolist(), prefix="", tools=[CALCULATOR])
        conversation.sampled(ids, np.zeros(ids.size), np.zeros(ids.size), message)

    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    conversation.feed([*system, *row.turns])
    if not calls:
        say(careless_answer(row.prompt))
        return conversation
    say(f'<|call|>calculator{{"expression":"{row.prompt[:-1]}"}}')
    (call,) = conversation.messages[-1]["tool_calls"]
    said = calculator(call["function"]["arguments"]["expression"])
    conversation.feed([{"role": "tool", "name": "calculator", "content": said}])
    say(said)
    return conversation


def test_one_trace_in_three_has_a_call(tokenizer: Any) -> None:
    rows = load_rows(TASK).train[:3000]
    direct, with_call = ToolTraces(tokenizer, TASK, 1 / 3).draw_lessons(rows, random.Random(0))
    assert len(with_call) == pytest.approx(1000, abs=80) and len(direct) + len(with_call) == 3000
    assert not any(262 in ids for ids, _ in direct) and all(262 in ids for ids, _ in with_call)
    only = ToolTraces(tokenizer, TASK, 1.0).draw_lessons(rows[:2], random.Random(0))
    assert [len(group) for group in only] == [2]


@pytest.mark.parametrize("name", ["reasoning_gym/chain_sum", "arithmetic + arithmetic:max_value=9"])
def test_other_tasks_are_refused(name: str) -> None:
    policy = Policy("tiny_agent", task=Task(name))
    for refuse in (check_model, resolve):
        with pytest.raises(ConfigError, match=r"tiny_agent cannot be warm-started on .* name arithmetic"):
            refuse(policy)
    check_model(Policy("tiny_agent"))
    check_model(Policy("tiny_agent", task=TASK))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_calls_in_a_third_of_its_episodes_and_is_right_in_those() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = resolve(Policy("tiny_agent", task=TASK))
    model, loaded = AutoModelForCausalLM.from_pretrained(path), load_tokenizer(path)
    rows = load_rows(TASK).held_out[:300]
    torch.manual_seed(0)
    episodes = play(model, loaded, rows, greedy=False)
    calling = [one for one in episodes if one.num_calls]
    assert 0.25 < len(calling) / len(episodes) < 0.42
    assert np.mean([one.right for one in episodes]) < 0.5
    assert np.mean([one.right for one in calling]) > 0.95
    assert np.mean([one.answered == one.calculated for one in calling]) > 0.97
    assert np.mean([one.right for one in play(model, loaded, rows[:150], greedy=True)]) < 0.5

"""Calls of a session as trees: random agents that go on, ask again, edit, summarise and work side by side."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowrl.agents import ChatTemplate, TokenSequence, examine
from flowrl.agents.chat_template import MARK, TextBound
from flowrl.agents.conversation import Span
from flowrl.agents.endpoint.session_tree import Asked, AskedMessages, MessageTree, RawPrompts, SampledBranches
from flowrl.agents.examination import shown_reply
from flowrl.errors import ConfigError
from flowrl.messages import Int32
from flowrl.models.tokens.chat import Messages
from tests.agents.chat_templates import ADD, characters, merging, templates, with_template

Message = Mapping[str, Any]
TOOLS: tuple[Messages, ...] = ((), (ADD,))
WORDS = st.sampled_from(["message", "role ", " the é1 tools", "content\n"])
"""Few, so that different agents often say the same."""


@functools.cache
def template_of(tokenizer: str, tools: int, name: str = "qwen2_5") -> ChatTemplate:
    made = with_template({"characters": characters, "merging": merging}[tokenizer](), templates()[name])
    return ChatTemplate(made, TOOLS[tools])


@functools.cache
def has_tools(name: str) -> bool:
    return not examine(template_of("merging", 0, name).tokenizer, [ADD]).no_tools


@functools.cache
def has_system(name: str) -> bool:
    try:
        template_of("merging", 0, name).render_text([{"role": "system", "content": "s"}, user("a")])
    except ConfigError:
        return False
    return True


@dataclass(frozen=True)
class Move:
    """What an agent does next, to a history that is drawn by `pick`."""

    kind: str
    pick: int
    at: int
    text: str
    calls: bool
    ended: bool
    cut: int
    """Where the reply's text is cut for sampling, so that its ids are others than tokenizing gives."""


MOVES = st.lists(
    st.builds(
        Move,
        kind=st.sampled_from(["begin", "go on", "go on", "go on", "again", "edit", "summarise", "side by side"]),
        pick=st.integers(0, 99),
        at=st.integers(0, 99),
        text=WORDS,
        calls=st.booleans(),
        ended=st.booleans(),
        cut=st.integers(1, 9),
    ),
    min_size=1,
    max_size=12,
)


@dataclass(frozen=True)
class Answered:
    """A call with its answer, as the agent has them."""

    tools: int
    messages: tuple[Message, ...]
    context: Int32
    sampled: Int32
    number: int
    reply: Message

    @property
    def history(self) -> tuple[Message, ...]:
        return (*self.messages, self.reply)


@dataclass
class Agents:
    """Plays moves against a tree, and keeps what was asked and answered."""

    tokenizer: str
    name: str = "qwen2_5"
    """Of the chat template."""
    distinct: bool = False
    """Whether no two replies say the same."""
    branches: SampledBranches = field(default_factory=SampledBranches)
    answered: list[Answered] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = MessageTree(lambda tools: self.template(TOOLS.index(tuple(tools))), self.branches)

    def template(self, tools: int) -> ChatTemplate:
        return template_of(self.tokenizer, tools, self.name)

    def play(self, moves: Sequence[Move]) -> None:
        for move in moves:
            tools, messages = self.next_call(move)
            try:
                asked = self.tree.find_context(messages, TOOLS[tools])
            except ConfigError:
                assert move.kind in ("edit", "summarise") and self.name != "qwen2_5"
                continue  # a template may refuse an order of messages that an agent made up
            if move.kind == "side by side":  # another call is answered between this one and its answer
                self.answer(self.tree.find_context(messages, TOOLS[tools]), tools, messages, move)
            self.answer(asked, tools, messages, move)

    def next_call(self, move: Move) -> tuple[int, tuple[Message, ...]]:
        if not self.answered or move.kind == "begin":
            system = ({"role": "system", "content": "s"},) if has_system(self.name) else ()
            return move.pick % 2 * has_tools(self.name), (*system, user(move.text))
        before = self.answered[move.pick % len(self.answered)]
        if move.kind in ("again", "side by side"):
            return before.tools, before.messages
        if move.kind == "edit":
            return before.tools, edited(before.messages, move)
        if move.kind == "summarise":
            return before.tools, (user(f"so far: {move.text}"), *followed(before.reply, move.text))
        return before.tools, (*before.messages, *followed(before.reply, move.text))

    def answer(self, asked: AskedMessages, tools: int, messages: tuple[Message, ...], move: Move) -> None:
        number, template = len(self.answered), self.template(tools)
        text = f"{move.text.strip()}{number}" if self.distinct else move.text.strip()
        ids, message = reply(template, text, move, calls=move.calls and tools == 1)
        span = Span(ids, template.decode(ids), logprobs(ids, number), np.full(ids.size, number, np.int32))
        context = asked.token_ids
        returned = self.tree.add_reply(asked, span, message)
        self.answered.append(Answered(tools, messages, context, ids, number, as_returned(returned, move)))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def followed(said: Message, text: str) -> tuple[Message, ...]:
    """The reply and what the agent says to it: the tool's answer if it called one."""
    if not said.get("tool_calls"):
        return said, user(text)
    return said, {"role": "tool", "content": text, "tool_call_id": said["tool_calls"][0]["id"]}


def edited(messages: tuple[Message, ...], move: Move) -> tuple[Message, ...]:
    """One message says something else, and what came after it is gone, up to the last user or tool message."""
    at = move.at % len(messages)
    changed = {**messages[at], "content": f"{messages[at]['content']}!{move.text}"}
    kept = (*messages[:at], changed)
    return kept if changed["role"] in ("user", "tool") else (*kept, user(move.text))


def as_returned(message: Message, move: Move) -> Message:
    """As clients send replies back: arguments as text, blanks trimmed, and sometimes no text beside a call."""
    returned = {**message, "content": message["content"].strip()}
    if message.get("tool_calls"):
        (call,) = message["tool_calls"]
        arguments = f'{{ "a":  "{call["function"]["arguments"]["a"]}"}}'
        returned["tool_calls"] = [{**call, "function": {**call["function"], "arguments": arguments}}]
        returned["content"] = None if move.ended else returned["content"]
    return returned


def reply(template: ChatTemplate, said: str, move: Move, *, calls: bool) -> tuple[Int32, Message]:
    if calls:
        shown = template.decode(shown_reply(template, template.probe_call(MARK))[0]).replace(MARK, said)
        call = template.probe_call(said)["tool_calls"][0]
        return template.render_ids(shown), {"role": "assistant", "content": "", "tool_calls": [{**call, "id": ""}]}
    end = template.boundary_before("user").token_ids[: 1 if move.ended else 0]
    ids = np.concatenate([template.render_ids(said[: move.cut]), template.render_ids(said[move.cut :]), end]).astype(
        np.int32
    )
    return ids, {"role": "assistant", "content": said}


def logprobs(ids: Int32, number: int) -> Any:
    return (-np.arange(1, ids.size + 1) / 8 - number).astype(np.float32)


def spans(sequence: TokenSequence) -> list[tuple[bytes, bytes, int]]:
    """(context, sampled ids, number of the reply) of each reply in the loss."""
    found = []
    for number in sorted(set(sequence.versions[sequence.policy_mask].tolist())):
        places = np.flatnonzero(sequence.versions == number)
        assert (np.diff(places) == 1).all()
        ids = sequence.token_ids[places]
        assert np.array_equal(sequence.behavior_logprobs[places], logprobs(ids, number))
        found.append((sequence.token_ids[: places[0]].tobytes(), ids.tobytes(), number))
    return found


PLAYED = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", sorted(templates()))
@settings(PLAYED, max_examples=6)
@given(moves=MOVES)
def test_each_reply_is_in_one_loss_with_every_template(name: str, moves: list[Move]) -> None:
    agents = Agents("merging", name)
    agents.play(moves)
    check_each_reply_is_in_one_loss(agents)


@pytest.mark.parametrize("tokenizer", ["characters", "merging"])
@PLAYED
@given(moves=MOVES)
def test_each_reply_is_in_one_loss_after_its_own_context(tokenizer: str, moves: list[Move]) -> None:
    agents = Agents(tokenizer)
    agents.play(moves)
    check_each_reply_is_in_one_loss(agents)


def check_each_reply_is_in_one_loss(agents: Agents) -> None:
    found = [span for sequence in agents.branches.sequences() for span in spans(sequence)]
    assert sorted(found, key=lambda span: span[2]) == [
        (one.context.tobytes(), one.sampled.tobytes(), one.number) for one in agents.answered
    ]


@pytest.mark.parametrize("tokenizer", ["characters", "merging"])
@PLAYED
@given(moves=MOVES)
def test_a_reply_that_comes_back_has_its_sampled_ids(tokenizer: str, moves: list[Move]) -> None:
    """In the order of the messages; and the whole says what the template makes of them."""
    agents = Agents(tokenizer)
    agents.play(moves)
    for one in agents.answered:
        template, end = template_of(tokenizer, one.tools), 0
        for message in one.messages:
            source = [other for other in agents.answered if other.reply == message]
            if source:
                places = [at for other in source if (at := find(one.context, other.sampled, end)) >= 0]
                assert places
                end = min(places)
        assert template.decode(one.context) == template.render_text(one.messages)


def find(ids: Int32, part: Int32, start: int) -> int:
    """Where `part` ends in `ids` at its first place from `start` on; -1 if it has none."""
    for at in range(start, ids.size - part.size + 1):
        if np.array_equal(ids[at : at + part.size], part):
            return at + part.size
    return -1


@PLAYED
@given(moves=MOVES)
def test_a_sequence_goes_on_wherever_an_agent_does(moves: list[Move]) -> None:
    """A sequence begins with each reply whose context goes on after no sequence's end."""
    agents = Agents("characters", distinct=True)
    agents.play(moves)
    ends: list[bytes] = []
    begun = 0
    for one in agents.answered:
        context = one.context.tobytes()
        before = [end for end in ends if context.startswith(end)]
        if before:
            ends.remove(max(before, key=len))
        begun += not before
        ends.append(context + one.sampled.tobytes())
    assert len(agents.branches.sequences()) == begun


def answered(tree: MessageTree, asked: AskedMessages, text: str, **message: Any) -> Message:
    """Add a reply whose ids are those of `text`, as the client sees it."""
    ids = template_of("characters", 0).render_ids(text)
    span = Span(ids, text, np.zeros(ids.size, np.float32), np.zeros(ids.size, np.int32))
    return tree.add_reply(asked, span, {"content": text, **message})


def decoded(asked: Asked) -> str:
    return template_of("characters", 0).decode(asked.token_ids)


def a_tree() -> tuple[MessageTree, SampledBranches]:
    branches = SampledBranches()
    return MessageTree(lambda tools: template_of("characters", TOOLS.index(tuple(tools))), branches), branches


def test_the_text_that_the_policy_sampled_is_kept_and_not_what_the_client_made_of_it() -> None:
    """Here the reply's reasoning, which the client never saw."""
    tree, _ = a_tree()
    said = answered(tree, tree.find_context([user("q")]), "<think>why</think>yes", content="yes")
    assert "<think>why</think>yes<|im_end|>" in decoded(tree.find_context([user("q"), said, user("more")]))
    assert "why" not in decoded(tree.find_context([user("q"), {**said, "content": "no"}, user("more")]))
    summary = tree.find_context([user("summary"), said, user("more")])
    assert "<think>why</think>yes<|im_end|>" in decoded(summary)


def test_a_reply_in_a_summary_is_context_and_trains_where_it_was_sampled() -> None:
    tree, branches = a_tree()
    said = answered(tree, tree.find_context([user("q")]), "yes")
    answered(tree, tree.find_context([user("summary"), said, user("more")]), "no")
    first, second = branches.sequences()
    assert [template_of("characters", 0).decode(s.token_ids[s.policy_mask]) for s in (first, second)] == ["yes", "no"]


def test_a_call_is_known_by_its_id_unless_its_arguments_were_edited() -> None:
    tree, _ = a_tree()
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "1 2"}}}
    asked = tree.find_context([user("q")], TOOLS[1])
    one = answered(tree, asked, "first", tool_calls=[call])
    two = answered(tree, asked, "second", tool_calls=[call])
    assert one["tool_calls"][0]["id"] != two["tool_calls"][0]["id"]

    def again(message: Message, arguments: str) -> str:
        sent = {**message["tool_calls"][0], "function": {"name": "add", "arguments": arguments}}
        back = {"role": "assistant", "content": None, "tool_calls": [sent]}
        answer = {"role": "tool", "content": "3", "tool_call_id": sent["id"]}
        return decoded(tree.find_context([user("q"), back, answer], TOOLS[1]))

    assert "second<|im_end|>" in again(two, '{"a":  "1 2"}') and "first<|im_end|>" in again(one, '{"a": "1 2"}')
    assert "second" not in again(two, '{"a": "1 3"}')


def test_a_calls_own_id_is_kept_once() -> None:
    tree, _ = a_tree()
    call = {"id": "add:0", "type": "function", "function": {"name": "add", "arguments": {"a": "1 2"}}}
    asked = tree.find_context([user("q")], TOOLS[1])
    ids = [answered(tree, asked, "first", tool_calls=[call, call])["tool_calls"][n]["id"] for n in (0, 1)]
    assert ids[0] == "add:0" and re.fullmatch(r"call\d{5}", ids[1])


def test_tools_are_part_of_the_root() -> None:
    tree, branches = a_tree()
    said = answered(tree, tree.find_context([user("q")]), "yes")
    answered(tree, tree.find_context([user("q"), said, user("more")], TOOLS[1]), "no")
    assert len(branches.sequences()) == 2


def test_replies_one_after_the_other_keep_their_ids() -> None:
    """As a client has them that took the message between out."""
    tree, _ = a_tree()
    one = answered(tree, tree.find_context([user("q")]), "<think>x</think>one", content="one")
    two = answered(tree, tree.find_context([user("q"), one, user("r")]), "<think>y</think>two", content="two")
    text = decoded(tree.find_context([user("q"), one, two, user("s")]))
    assert "<think>x</think>one<|im_end|>\n<|im_start|>assistant\n<think>y</think>two<|im_end|>" in text


@PLAYED
@given(
    texts=st.lists(st.tuples(WORDS, WORDS, st.integers(1, 9), st.booleans()), min_size=1, max_size=6),
    as_ids=st.booleans(),
)
def test_prompts_that_go_on_have_the_sampled_ids(texts: list[tuple[str, str, int, bool]], as_ids: bool) -> None:
    template, branches = template_of("merging", 0), SampledBranches()
    raw, prompt, ids_so_far = (
        RawPrompts(template.tokenizer, branches, TextBound(1 << 20, None)),
        "",
        np.zeros(0, np.int32),
    )
    for number, (fed, said, cut, ended) in enumerate(texts):
        prompt, ids_so_far = f"{prompt}{fed}", np.concatenate([ids_so_far, template.render_ids(fed)])
        asked = raw.find_context(ids_so_far.tolist() if as_ids else prompt)
        text = f"{said}{fed}{said}"
        end = template.render_ids("<|im_end|>") if ended else template.render_ids("")
        ids = np.concatenate([template.render_ids(text[:cut]), template.render_ids(text[cut:]), end]).astype(np.int32)
        raw.add_reply(asked, Span(ids, "", logprobs(ids, number), np.full(ids.size, number, np.int32)), text)
        ids_so_far = np.concatenate([asked.token_ids, ids if as_ids else ids[: ids.size - end.size]])
        prompt += text
        following = raw.find_context([*ids_so_far.tolist(), 5] if as_ids else f"{prompt}x")
        assert np.array_equal(following.token_ids[: ids_so_far.size], ids_so_far)
    cuts = 0 if as_ids else sum(ended for *_, ended in texts[:-1])
    assert len(branches.sequences()) == 1 + cuts

"""Conversations of every chat template in TRL's wheel: random messages and tools, random ids, both histories."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowrl.agents import ChatTemplate, Conversation, Examination, TokenSequence, examine
from flowrl.agents.chat_template import MARK
from flowrl.agents.examination import shown_reply
from flowrl.errors import ConfigError
from flowrl.messages import Int32
from flowrl.models import Policy, load_tokenizer, resolve
from tests.agents.chat_templates import ADD, characters, merging, templates, with_template

TEXT = st.text(alphabet="abc 12\n.,:é→", max_size=12)
"""Without the letters of `serial`, so that each reply is found by its own."""


@dataclass(frozen=True)
class Exchange:
    """What is fed, and how the policy answers."""

    fed: str
    kind: str
    reply: str
    ended: bool
    """Whether the policy samples its end token."""
    cuts: tuple[int, ...]
    """Where the reply's text is cut for sampling: other ids than tokenizing the whole text gives."""
    noise: tuple[int, ...]
    """Any ids before a plain reply, whether or not they are text."""


@dataclass(frozen=True)
class Known:
    """A template with its tokenizer, and what its examination found."""

    template: ChatTemplate
    examination: Examination
    has_system: bool


@functools.cache
def smollm2() -> Any:
    """Its tokenizer. Loading it takes four times as long as a copy."""
    return load_tokenizer(resolve(Policy("smollm2")))


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "characters": characters,
    "merging": merging,
    "smollm2": lambda: copy.deepcopy(smollm2()),
}


@functools.cache
def known(name: str, tokenizer: str) -> Known:
    made = with_template(TOKENIZERS[tokenizer](), templates()[name])
    examination = examine(made, [ADD])
    template = ChatTemplate(made, () if examination.no_tools else [ADD])
    try:
        template.render_text([{"role": "system", "content": "short"}, {"role": "user", "content": "a"}])
    except ConfigError:
        return Known(template, examination, has_system=False)
    return Known(template, examination, has_system=True)


def exchanges(of: Known) -> st.SearchStrategy[list[Exchange]]:
    kinds = ["plain", *([] if of.examination.no_tools else ["call"])]
    if "</think>" in of.template.tokenizer.chat_template:
        kinds.append("reasoning")
    return st.lists(
        st.builds(
            Exchange,
            fed=TEXT,
            kind=st.sampled_from(kinds),
            reply=TEXT,
            ended=st.booleans(),
            cuts=st.lists(st.integers(1, 40), max_size=3).map(tuple),
            noise=st.lists(st.integers(0, 255), max_size=3).map(tuple),
        ),
        min_size=1,
        max_size=4,
    )


@dataclass(frozen=True)
class Request:
    """A context as it was asked for, and what was sampled for it."""

    context: Int32
    sampled: Int32
    logprobs: Any
    versions: Any
    serial: str
    messages: Sequence[Mapping[str, Any]]
    kind: str


class Played:
    """A conversation that was played, with all that its requests were."""

    def __init__(self, of: Known, history: Any, script: Sequence[Exchange], *, system: bool, exact: bool) -> None:
        self.of = of
        self.template = of.template
        self.conversation = Conversation(of.template, history=history)
        self.requests: list[Request] = []
        self.exact = exact
        """Whether the policy samples the ids that tokenizing its text gives, and always its end token."""
        if system and of.has_system:
            self.conversation.feed([{"role": "system", "content": "s"}])
        calls = False
        for n, exchange in enumerate(script):
            self._exchange(n, exchange, answer=calls)
            calls = exchange.kind == "call"
        answer = self.template.probe_answer("last")
        self.conversation.feed([answer if calls else {"role": "user", "content": "last"}])
        self.last = self.conversation.context()

    def _exchange(self, n: int, exchange: Exchange, *, answer: bool) -> None:
        told = f"{exchange.fed}t{n}."
        self.conversation.feed([self.template.probe_answer(told) if answer else {"role": "user", "content": told}])
        context = self.conversation.context()
        ids, message, serial = self._reply(n, exchange)
        before = self.conversation.messages
        request = Request(
            context, ids, -np.arange(1, ids.size + 1) / 8, np.full(ids.size, n), serial, before, exchange.kind
        )
        self.requests.append(request)
        self.conversation.sampled(ids, request.logprobs, request.versions, message)

    def _reply(self, n: int, exchange: Exchange) -> tuple[Int32, Mapping[str, Any] | None, str]:
        serial = f"z{n}z"
        if exchange.kind == "call":
            text = self._shown(self.template.probe_call(MARK), serial)
            return self._sampled(text, exchange), self.template.probe_call(serial), serial
        if exchange.kind == "plain" and self.exact:
            said = {"role": "assistant", "content": f"{exchange.reply.strip()}{serial}"}
            text = self._shown({"role": "assistant", "content": MARK}, said["content"])
            return self._sampled(text, exchange), said, serial
        if exchange.kind == "reasoning":
            opened = self.template.decode(self.conversation.context()).rstrip().endswith("<think>")
            text = ("" if opened else "<think>\n") + f"why\n</think>\n\n{exchange.reply.strip()}{serial}"
        else:
            text = f"{exchange.reply}{serial}"
        end = self.template.boundary_before("user").token_ids[: 1 if exchange.ended or self.exact else 0]
        noise = [] if self.exact or exchange.kind != "plain" else exchange.noise
        ids = np.concatenate([self._plain(noise), self._sampled(text, exchange), end])
        return ids.astype(np.int32), None, serial

    def _shown(self, reply: Mapping[str, Any], content: str) -> str:
        """As the template shows `reply`, with `content` in place of the mark."""
        return self.template.decode(shown_reply(self.template, reply)[0]).replace(MARK, content)

    def _plain(self, noise: Sequence[int]) -> Int32:
        added = self.template.tokenizer.added_tokens_decoder
        return np.array([token for token in noise if token not in added], np.int32)

    def _sampled(self, text: str, exchange: Exchange) -> Int32:
        cuts = [] if self.exact else sorted({0, *(cut % (len(text) + 1) for cut in exchange.cuts)})
        cuts = [cut for cut in cuts if cut <= text.find("<") or "<" not in text] or [0]
        parts = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
        return np.concatenate([self.template.render_ids(part) for part in parts])

    def sequences(self) -> tuple[TokenSequence, ...]:
        return self.conversation.sequences()


def spans(sequence: TokenSequence) -> list[tuple[Any, ...]]:
    """(context, sampled, logprobs, versions) of every run of policy tokens, as a trainer sees them."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sequence.policy_mask.astype(int), [0]])))
    return [
        (
            tuple(sequence.token_ids[:a].tolist()),
            tuple(sequence.token_ids[a:b].tolist()),
            tuple(sequence.behavior_logprobs[a:b].tolist()),
            tuple(sequence.versions[a:b].tolist()),
        )
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


def asked(played: Played) -> list[tuple[Any, ...]]:
    """The same of every request."""
    return [
        (tuple(r.context.tolist()), tuple(r.sampled.tolist()), tuple(r.logprobs.tolist()), tuple(r.versions.tolist()))
        for r in played.requests
    ]


def cases(*tokenizers: str) -> list[Any]:
    """All; with smollm2's tokenizer, and templates' variants for training with the merging one, among the slow, of
    which `make test` has every third."""
    slow_ones = [(name, tokenizer) for tokenizer in tokenizers for name in templates() if slow(name, tokenizer)]

    def marks(name: str, tokenizer: str) -> list[pytest.MarkDecorator]:
        if not slow(name, tokenizer):
            return []
        return [pytest.mark.slow] if (name, tokenizer) in slow_ones[::3] else [pytest.mark.slow, pytest.mark.matrix]

    return [
        pytest.param(name, tokenizer, id=f"{name}-{tokenizer}", marks=marks(name, tokenizer))
        for tokenizer in tokenizers
        for name in templates()
    ]


def slow(name: str, tokenizer: str) -> bool:
    return tokenizer == "smollm2" or (tokenizer == "merging" and name.endswith("_training"))


EXAMPLES = int(os.environ.get("FLOWRL_TEMPLATE_EXAMPLES", "3"))
"""Examples for each property, template and tokenizer; `make templates` asks for more than all tests have time for."""
FEW = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
EVERY = pytest.mark.parametrize(("name", "tokenizer"), cases("characters", "merging", "smollm2"))


@EVERY
@FEW
@given(data=st.data())
def test_appended_history(name: str, tokenizer: str, data: st.DataObject) -> None:
    of = known(name, tokenizer)
    played = Played(of, "append", data.draw(exchanges(of)), system=data.draw(st.booleans()), exact=False)
    check_concatenation(played)
    check_fed_pieces(played)
    check_a_change_is_seen(played, data)


@EVERY
@FEW
@given(data=st.data())
def test_what_re_tokenizing_gives_where_the_policy_samples_it(name: str, tokenizer: str, data: st.DataObject) -> None:
    of = known(name, tokenizer)
    played = Played(of, "append", data.draw(exchanges(of)), system=data.draw(st.booleans()), exact=True)
    for _, context, messages in after_replies(played):
        text = of.template.render_text(messages)
        whole = of.template.render_ids(text)
        if of.template.decode(context) == text and set(joints(played, context)) <= set(ends(of, whole)):
            assert np.array_equal(context, whole)
    if not of.examination.rewrites and tokenizer == "characters":
        assert np.array_equal(
            played.last, of.template.render_ids(of.template.render_text(played.conversation.messages))
        )


@EVERY
@FEW
@given(data=st.data())
def test_the_templates_history(name: str, tokenizer: str, data: st.DataObject) -> None:
    of = known(name, tokenizer)
    exact = data.draw(st.booleans())
    played = Played(of, "template", data.draw(exchanges(of)), system=data.draw(st.booleans()), exact=exact)
    check_renderings(played, by_id=exact and tokenizer == "characters")
    check_each_reply_is_in_one_loss(played)
    check_a_change_is_seen(played, data)
    check_starts(played)


def test_a_rewritten_context_costs_a_few_renderings_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each earlier reply made an episode cubic: of 128 turns 38 s in place of 1.5."""
    template, rendered, num_turns = known("qwen3", "characters").template, list[int](), 24
    plain = ChatTemplate.render_text
    monkeypatch.setattr(ChatTemplate, "render_text", lambda self, told: rendered.append(len(told)) or plain(self, told))
    conversation = Conversation(template, history="template")
    for turn in range(num_turns):
        conversation.feed([{"role": "user", "content": f"question {turn}"}])
        conversation.context()
        said = f"<think>\nwhy {turn}\n</think>\n\nreply {turn}"
        ids = template.render_ids(said)
        lengths = np.zeros(ids.size)
        conversation.sampled(ids, lengths, lengths, {"role": "assistant", "content": said})
    assert len(conversation.sequences()) == num_turns, "each context rewrites the one before"
    assert len(rendered) <= 3 * num_turns


def check_starts(played: Played) -> None:
    """One rendering finds what one for each reply finds."""
    template, messages = played.template, played.conversation.messages
    text = template.render_text(messages)
    replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    each = [template.marked_start(messages, index, text) for index in replies]
    assert template.marked_starts(messages, replies, text) == each


def check_concatenation(played: Played) -> None:
    """The context is what was fed and sampled, in order, and the loss is on what was sampled."""
    (sequence,) = played.sequences()
    kept = np.zeros(0, np.int32)
    for request in played.requests:
        assert np.array_equal(request.context[: kept.size], kept)
        kept = np.concatenate([request.context, request.sampled])
    assert np.array_equal(sequence.token_ids, kept)
    assert spans(sequence) == asked(played)
    assert np.array_equal(played.last[: kept.size], kept)
    masked = ~sequence.policy_mask
    assert not sequence.behavior_logprobs[masked].any() and (sequence.versions[masked] == -1).all()


def check_fed_pieces(played: Played) -> None:
    """With what was sampled each piece is what the template renders after the reply's last word."""
    template, first = played.template, played.requests[0]
    assert template.decode(first.context) == template.render_text(first.messages)
    for request, context, messages in after_replies(played):
        piece = template.decode(context[request.context.size + request.sampled.size :])
        shown = template.render_text(messages).split(request.serial)[-1]
        assert shown.endswith(piece)
        assert (template.decode(request.sampled) + piece).endswith(shown)


def check_renderings(played: Played, *, by_id: bool) -> None:
    template = played.template
    contexts = [(r.context, r.messages) for r in played.requests] + [(played.last, played.conversation.messages)]
    for n, (context, messages) in enumerate(contexts):
        text = template.render_text(messages)
        assert template.decode(context) == text
        if by_id:
            assert np.array_equal(context, template.render_ids(text))
        for request in played.requests[:n]:
            shown = template.decode(request.sampled)
            # A template may strip a reply and write white space of its own before it: then it has not kept the reply.
            kept = shown in text and shown == shown.lstrip()
            if request.kind == "plain" and kept and template.is_ended(request.sampled):
                assert contains(context, request.sampled)


def check_each_reply_is_in_one_loss(played: Played) -> None:
    """In the order of the requests, each after its own context; a branch begins where a context is rewritten."""
    assert [span for sequence in played.sequences() for span in spans(sequence)] == asked(played)
    branches = 1
    for request, context, _ in after_replies(played)[:-1]:
        kept = np.concatenate([request.context, request.sampled])
        branches += not np.array_equal(context[: kept.size], kept)
    assert len(played.sequences()) == branches


def check_a_change_is_seen(played: Played, data: st.DataObject) -> None:
    """Of one id, in any sequence at any place, by comparing spans with requests."""
    sequences = list(played.sequences())
    index = data.draw(st.integers(0, len(sequences) - 1))
    ids = sequences[index].token_ids.copy()
    ids[data.draw(st.integers(0, ids.size - 1))] += 1
    sequences[index] = replace(sequences[index], token_ids=ids)
    assert [span for sequence in sequences for span in spans(sequence)] != asked(played)


def after_replies(played: Played) -> list[tuple[Request, Int32, Sequence[Mapping[str, Any]]]]:
    """Each request with the context that came after it and what it was to render."""
    later = [*((r.context, r.messages) for r in played.requests[1:]), (played.last, played.conversation.messages)]
    return [(request, *after) for request, after in zip(played.requests, later, strict=True)]


def ends(of: Known, ids: Int32) -> list[int]:
    """Where each token ends, in bytes: a byte-level token is written with a character for each byte."""
    return np.cumsum([len(token) for token in of.template.tokenizer.convert_ids_to_tokens(ids.tolist())]).tolist()


def joints(played: Played, context: Int32) -> list[int]:
    """Where the pieces that were fed and sampled meet in `context`, in bytes."""
    sizes = [size for r in played.requests for size in (r.context.size, r.context.size + r.sampled.size)]
    all_ends = ends(played.of, context)
    return [all_ends[size - 1] for size in sizes if size <= context.size]


def contains(ids: Int32, part: Int32) -> bool:
    windows = np.lib.stride_tricks.sliding_window_view(ids, part.size)
    return bool((windows == part).all(axis=1).any())

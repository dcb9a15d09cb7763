"""Long texts at the endpoint: refused before they are tokenized if no context has room, else tokenized in a thread."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flowrl.agents import chat_template
from flowrl.agents.endpoint.call_sampler import LONG
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.models.tokens.vocabulary import BYTE_TOKENS, COMPOSED, most_characters_per_token
from tests.agents.endpoint_rig import EndpointRig, an_endpoint

LINES = ["the cat sat on the mat        again and again", "  indented\n\n\n", "été Ångström 東京 한국어", "12345 + 678"]


def wrapped(core: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=core)


def byte_level(**changes: Any) -> Any:
    """As Qwen's tokenizer: NFC, a pattern, bytes, merges."""
    core = Tokenizer(models.BPE())
    core.normalizer = changes.get("normalizer", normalizers.NFC())
    parts = [pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    core.pre_tokenizer = changes.get("split", pre_tokenizers.Sequence(parts))
    alphabet = pre_tokenizers.ByteLevel.alphabet()[: changes.get("num_bytes", 256)]
    core.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    core.add_special_tokens([AddedToken("<|end|>", lstrip=changes.get("lstrip", False))])
    return wrapped(core)


def with_fallback(**changes: Any) -> Any:
    """As Gemma's and Llama 2's: blanks are replaced, and unknown characters are bytes."""
    vocabulary = {
        token: number for number, token in enumerate(["<unk>", *sorted(BYTE_TOKENS)[changes.get("lost", 0) :]])
    }
    for token in ("▁", "a", "▁a", "▁▁▁▁▁▁▁▁"):
        vocabulary[token] = len(vocabulary)
    core = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.ByteFallback()
    return wrapped(core)


def of_words() -> Any:
    core = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrapped(core)


BOUNDED: dict[str, Callable[[], Any]] = {
    "tiny": character_tokenizer,
    "byte_level": byte_level,
    "with_fallback": with_fallback,
}
TOKENIZERS = {name: make() for name, make in BOUNDED.items()}
HARD = st.sampled_from(["<|end|>", " " * 64, "\u03b1\u0313\u0300\u0345", "\u1112\u1161\u11ab", "x" * 99, "the cat "])


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.text(), HARD), max_size=20).map("".join))
def test_no_token_stands_for_more(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    most = most_characters_per_token(tokenizer)
    assert most is not None
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) * most >= len(text)


def test_the_bound_is_the_longest_entry_and_what_is_composed() -> None:
    assert most_characters_per_token(TOKENIZERS["tiny"]) == len("<|assistant|>")
    longest = max(map(len, TOKENIZERS["byte_level"].get_vocab()))
    assert most_characters_per_token(TOKENIZERS["byte_level"]) == longest * COMPOSED
    assert most_characters_per_token(TOKENIZERS["with_fallback"]) == len("▁▁▁▁▁▁▁▁")


@pytest.mark.parametrize(
    "make",
    [
        of_words,
        lambda: byte_level(lstrip=True),
        lambda: byte_level(normalizer=normalizers.NFKC()),
        lambda: byte_level(normalizer=normalizers.Replace("aa", "")),
        lambda: byte_level(split=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed")])),
        lambda: byte_level(split=pre_tokenizers.Digits()),
        lambda: byte_level(num_bytes=0, split=pre_tokenizers.Digits()),
        lambda: with_fallback(lost=1),
        lambda: object(),
    ],
)
def test_there_is_no_bound_where_a_token_may_stand_for_any_length(make: Callable[[], Any]) -> None:
    assert most_characters_per_token(make()) is None


async def post(rig: EndpointRig, path: str, body: dict[str, Any], key: str = "") -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key or rig.access.api_key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{rig.endpoint.url}/v1/{path}", json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


def said(text: str) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": 5}


def test_what_fits_into_no_context_is_refused_without_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    text, tokenized = "a b" * (1 << 20), []
    plain = chat_template.token_ids
    monkeypatch.setattr(chat_template, "token_ids", lambda t, text: tokenized.append(len(text)) or plain(t, text))

    async def scenario() -> None:
        async with an_endpoint() as rig:
            for path, body in (
                ("chat/completions", said(text)),
                ("completions", {"model": "policy", "prompt": text}),
                ("responses", {"model": "policy", "input": text}),
                ("messages", said(text)),
                ("messages/count_tokens", said(text)),
            ):
                status, found = await post(rig, path, body)
                (least,) = re.findall(r"^prompt is too long: (\d+) tokens > 1999 maximum", found["error"]["message"])
                assert status == 400 and 0 <= int(least) - len(text) / len("<|assistant|>") < 10
                code = found["error"].get("code")
                assert code == (None if "messages" in path else "context_length_exceeded")
            assert (await post(rig, "chat/completions", said("hi")))[0] == 200
            assert rig.end().full

    asyncio.run(scenario())
    assert tokenized and max(tokenized) < LONG


def test_other_calls_are_answered_while_a_long_text_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the client of the long one leaves, the next call of its session waits for the thread, and is answered."""
    begun, go_on, plain = threading.Event(), threading.Event(), chat_template.token_ids

    def slow(tokenizer: Any, text: str) -> Any:
        if len(text) > LONG:
            begun.set()
            assert go_on.wait(30)
        return plain(tokenizer, text)

    async def scenario() -> None:
        from flowrl.agents.endpoint import SessionTask

        async with an_endpoint(context_tokens=1 << 20, leave_s=0.01) as rig:
            other = rig.endpoint.open_session(SessionTask("other")).api_key
            long = asyncio.create_task(post(rig, "chat/completions", said("a" * 2 * LONG)))
            await asyncio.to_thread(begun.wait, 30)
            assert (await post(rig, "chat/completions", said("hi"), other))[0] == 200
            assert not long.done()
            long.cancel()
            await asyncio.wait({long})
            follows = asyncio.create_task(post(rig, "chat/completions", said("hi")))
            assert (await post(rig, "chat/completions", said("hey"), other))[0] == 200
            assert not follows.done()
            go_on.set()
            assert (await follows)[0] == 200
            status, found = await post(rig, "messages/count_tokens", said("a" * 2 * LONG))
            assert status == 200 and found["input_tokens"] > 2 * LONG
            assert (await post(rig, "chat/completions", said("a" * 2 * LONG)))[0] == 200

    monkeypatch.setattr(chat_template, "token_ids", slow)
    asyncio.run(scenario())

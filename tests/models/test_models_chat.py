"""How rows become tokens: as rollouts, in which the answer follows the generation prompt as tokens of its own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.models.tokens.chat import Chat, Unrendered, continued_ids, end_texts, template_end, token_ids

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>")
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The pre-tokenization of Qwen 2 to 3 and Llama 3: newlines in a row are one piece."""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = CHATML.replace("m['content']", "m['content'] | trim")
PLAIN_MARKS = (
    "{% for m in messages %}{{ m['role'] | upper + ': ' + m['content'] + (eos_token if m['role'] == 'assistant' else "
    "'\n') }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
FORGETTING = (  # shows thoughts of the last turn alone, as templates of reasoning models do
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] if loop.last else "
    "m['content'].split('</think>')[-1] | trim) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
ENDLESS = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
BLANKS = ["", " ", "\n", "\n\n", "\r\n", " \n", "\t", "\u00a0", "\u2028", "\u3000", "\n \n\n", "\n\n\n\n\n\n"]
ASKED = ({"role": "user", "content": "q"},)


@functools.cache
def _trained(regex: str) -> str:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(regex), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    lines = ["\n\nHello  world\n\n\n the answer is 42.\n", "a\n\n\nb \n\n c assistant\n\n", "ASSISTANT: Hello"] * 60
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(lines, trainer)
    return str(core.to_str())


def merging(template: str | None = CHATML, *, eos: str = "<|im_end|>") -> Any:
    """A byte-level tokenizer that merges newlines, as those of models do."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(QWEN)),
        eos_token=eos,
        pad_token="<pad>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def prefixing(scheme: str) -> Any:
    """A tokenizer that puts a blank before a text, or before each part of it, as sentencepiece's do."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(33, 127)]
    words = ["\u2581", "\n", *letters, "\u2581H", "\u2581He", "\u2581Hello", "He", "Hello", "lo", "llo"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([*SPECIAL, *words]))}
    merges = [
        ("\u2581", "H"),
        ("H", "e"),
        ("\u2581H", "e"),
        ("l", "o"),
        ("l", "lo"),
        ("He", "llo"),
        ("\u2581He", "llo"),
    ]
    core = Tokenizer(models.BPE(vocab, merges))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", chat_template=PLAIN_MARKS, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("template", [CHATML, TRIMMING, PLAIN_MARKS, FORGETTING, None], ids=str)
@pytest.mark.parametrize("behind", ["", "\n", "  \n"])
def test_an_answer_is_its_own_tokens_behind_the_prompt_that_a_rollout_has(template: str | None, behind: str) -> None:
    tokenizer = merging(template)
    chat = Chat(tokenizer)
    prompt = chat.encode_prompt(ASKED)[1]
    for before in BLANKS:
        answer = f"{before}Hello{behind}"
        ids, mask = chat.encode_completion(ASKED, answer)
        shown = answer.strip() if template == TRIMMING else answer
        expected = [*token_ids(tokenizer, shown), tokenizer.eos_token_id]
        assert ids[~mask].tolist() == prompt.tolist()
        assert ids[mask].tolist() == expected, answer
        assert np.flatnonzero(mask).tolist() == [*range(prompt.size, ids.size)]
        assert np.array_equal(chat.encode_demonstration(ASKED, answer)[0], ids)


@pytest.mark.parametrize("blank", BLANKS)
def test_an_answer_of_blanks_alone_is_trained_with_its_end(blank: str) -> None:
    tokenizer = merging()
    ids, mask = Chat(tokenizer).encode_completion(ASKED, blank)
    assert ids[mask].tolist() == [*token_ids(tokenizer, blank), tokenizer.eos_token_id]


@pytest.mark.parametrize("template", [CHATML, FORGETTING, TRIMMING])
@pytest.mark.parametrize("blank", BLANKS)
def test_earlier_answers_are_their_own_tokens_too(template: str, blank: str) -> None:
    tokenizer = merging(template)
    turns = [*ASKED, {"role": "assistant", "content": f"{blank}one{blank}"}, {"role": "user", "content": "r"}]
    ids, mask = Chat(tokenizer).encode_demonstration(turns, f"{blank}two")
    first = "one" if template != CHATML else f"{blank}one{blank}"
    last = "two" if template == TRIMMING else f"{blank}two"
    end = [tokenizer.eos_token_id]
    assert ids[mask].tolist() == [*token_ids(tokenizer, first), *end, *token_ids(tokenizer, last), *end]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        [*turns, {"role": "assistant", "content": f"{blank}two"}], tokenize=False
    ).removesuffix("\n")


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_tokenizer_that_puts_a_blank_before_a_text_puts_none_before_an_answer(scheme: str) -> None:
    tokenizer = prefixing(scheme)
    assert tokenizer.convert_ids_to_tokens(token_ids(tokenizer, "Hello")) == ["\u2581Hello"]
    assert tokenizer.convert_ids_to_tokens(continued_ids(tokenizer, "Hello")) == ["Hello"]
    ids, mask = Chat(tokenizer).encode_completion(ASKED, "Hello")
    assert tokenizer.convert_ids_to_tokens(ids[mask]) == ["Hello", "</s>"]


def test_what_a_template_does_is_told_by_what_it_shows() -> None:
    with pytest.raises(
        Unrendered, match=r"it shows '<think>\\n', and then 'Hello<\|im_end\|>\\n', which a policy that"
    ):
        Chat(merging(THINKING)).encode_completion(ASKED, "Hello")
    assert Chat(merging(THINKING)).encode_completion(ASKED, "<think>\n\n</think>\n\nHello")[1].any()


def test_a_template_that_refuses_a_row_says_so() -> None:
    raising = "{{ raise_exception('roles must alternate') }}"
    for render in (
        Chat(merging(raising)).encode_prompt,
        lambda turns: Chat(merging(raising)).encode_completion(turns, "a"),
    ):
        with pytest.raises(Unrendered, match=r"the chat template refuses it \(roles must alternate\)"):
            render(ASKED)


@pytest.mark.parametrize("answer", ["Hello", "Hello<|im_end|>", "Hello<|im_end|>\n", "Hello<|endoftext|><|im_end|>"])
def test_an_answer_is_trained_with_one_end_whatever_the_row_writes(answer: str) -> None:
    tokenizer = merging(eos="<|endoftext|>")
    assert end_texts(tokenizer) == ("<|endoftext|>", "<|im_end|>")
    ids, mask = Chat(tokenizer).encode_completion(ASKED, answer)
    assert tokenizer.decode(ids[mask]) == "Hello<|im_end|>"


def test_an_end_token_in_the_middle_of_an_answer_is_refused_unless_a_policy_has_sampled_it() -> None:
    chat = Chat(merging())
    with pytest.raises(Unrendered, match=r"holds the end token '<\|im_end\|>' in its middle"):
        chat.encode_completion(ASKED, "a <|im_end|> b")
    assert chat.encode_scored(ASKED, "a <|im_end|> b", sampled=True)[0].size
    chat.encode_completion(ASKED, "a <|im_start|> b")  # which a policy can sample


@pytest.mark.parametrize(
    ("template", "eos", "end"),
    [
        (CHATML, "<|im_end|>", ["<|im_end|>"]),
        (CHATML, "<|endoftext|>", ["<|im_end|>", "<|endoftext|>"]),
        (PLAIN_MARKS, "</s>", ["</s>"]),
        (ENDLESS, "<|endoftext|>", ["<|endoftext|>"]),
        (None, "<|endoftext|>", ["<|endoftext|>"]),
    ],
)
def test_a_reward_model_reads_one_end_token_behind_the_templates_end(
    template: str | None, eos: str, end: list[str]
) -> None:
    """In training, in scoring a text, and in scoring a sample's own tokens, whatever the policy stopped at."""
    tokenizer = merging(template, eos=eos)
    chat = Chat(tokenizer)
    ids, mask = chat.encode_scored(ASKED, "Hello")
    read = tokenizer.convert_ids_to_tokens(ids)
    prompt, hello = chat.encode_prompt(ASKED)[1].tolist(), token_ids(tokenizer, "Hello").tolist()
    assert read[-len(end) :] == end and read[len(prompt) :].count(eos) == 1
    assert mask.size == ids.size and mask[len(prompt) :].all() and not mask[: len(prompt)].any()
    if template != ENDLESS:  # its newline is no end that a policy would stop at
        for stopped in ([], [tokenizer.eos_token_id], tokenizer.convert_tokens_to_ids(end)):
            assert chat.close_response(np.array([*prompt, *hello, *stopped], np.int32)).tolist() == ids.tolist()
    for text in ("Hello", f"Hello{eos}", "Hello" + "".join(end)):
        assert chat.encode_scored(ASKED, text, sampled=True)[0].tolist() == ids.tolist()


def test_a_template_without_an_end_is_known() -> None:
    assert template_end(merging(ENDLESS)) == ""
    assert template_end(merging()) == "<|im_end|>"
    with pytest.raises(ConfigError, match="nothing to train"):
        Chat(merging("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}")).encode_completion(
            ASKED, "a"
        )


def test_a_template_that_shows_lists_of_parts_alone_gets_texts_as_such() -> None:
    parts = CHATML.replace(
        "m['content']", "(m['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join)"
    )
    for template in (parts, parts.replace(" | selectattr('type', 'equalto', 'text')", "")):
        ids, mask = Chat(merging(template)).encode_demonstration(ASKED, "Hello")
        assert ids.tolist() == Chat(merging()).encode_demonstration(ASKED, "Hello")[0].tolist() and mask.any()


def test_a_template_that_shows_nothing_of_messages_is_refused() -> None:
    chat = Chat(merging("{% for m in messages %}{{ m['role'] }}<|im_end|>{% endfor %}"))
    for render in (
        chat.encode_prompt,
        lambda turns: chat.encode_completion(turns, "a"),
        lambda turns: chat.encode_demonstration(turns, "a"),
    ):
        with pytest.raises(Unrendered, match="shows nothing of what a message says"):
            render(ASKED)


def test_a_template_that_drops_an_answer_is_refused() -> None:
    dropping = CHATML.replace("m['content']", "(m['content'] if m['role'] == 'user' else '')")
    with pytest.raises(Unrendered, match="shows nothing of the answer"):
        Chat(merging(dropping)).encode_completion(ASKED, "a")
    assert Chat(merging(dropping)).encode_completion(ASKED, " ")[1].any(), "which says nothing"

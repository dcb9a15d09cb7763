"""Models: names that are refused, the character tokenizer, chat by template, and a cache without halves."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import ConfigError
from flowrl.machine.cache import cached_model
from flowrl.models import Chat, Policy, check_model, known_context, load_tokenizer, resolve
from flowrl.models.built_in_models import Recipe
from flowrl.models.model_files import context_length
from flowrl.models.tokens.characters import SPECIAL, character_tokenizer
from flowrl.tasks import Task


@pytest.fixture(autouse=True)
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, but for tests that are about a model which others make too."""
    if "of_everyone" not in request.fixturenames:
        monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def of_everyone() -> None:
    """The test takes what is in the machine's cache, and leaves there what it makes."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return character_tokenizer()


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nor smollm2 nor a directory on this machine, and names on the Hub .* did you mean tiny\?"
    ):
        check_model(Policy("tinny"))
    with pytest.raises(ConfigError, match=r"config.json is missing"):
        check_model(Policy(str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no weights"):
        check_model(Policy(str(tmp_path)))
    with pytest.raises(ConfigError, match="empty"):
        Policy("")


@given(text=st.text(alphabet=st.characters(max_codepoint=127)).filter(lambda text: "<|" not in text))
def test_every_ascii_text_comes_back_from_its_characters(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def saved_with(tokenizer: Any, directory: Path, **changes: str) -> Path:
    """A model's tokenizer files, with `changes` to what they say of themselves."""
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "qwen2"}')
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return directory


@pytest.mark.parametrize("saved_by", ["Qwen2Tokenizer", "TokenizersBackend", "LlamaTokenizer", "Gone"])
def test_a_tokenizer_is_the_one_that_transformers_finds(tokenizer: Any, tmp_path: Path, saved_by: str) -> None:
    from transformers import AutoTokenizer

    directory = saved_with(tokenizer, tmp_path, tokenizer_class=saved_by)
    found, expected = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert type(found) is type(expected) and found.get_vocab() == expected.get_vocab()
    text = "Hello  1+1=\n\t\u00e9<|end|> <|user|>"
    assert found(text) == expected(text) and found.chat_template == expected.chat_template


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json is damaged .Expecting property name"),
        ("tokenizer.json", "[]", "tokenizer.json is damaged .a list where an object was needed"),
        ("tokenizer.json", '{"added_tokens": [], "model": {"type": "?"}}', "tokenizer.json is no tokenizer that can"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is damaged .a list where an object was needed"),
        ("config.json", "{", "config.json is damaged .Expecting property name"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_names_its_file(
    tokenizer: Any, tmp_path: Path, name: str, content: str, message: str
) -> None:
    directory = saved_with(tokenizer, tmp_path)
    (directory / name).write_text(content)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/{message}.*; put the file of the model there$"):
        load_tokenizer(directory)


def test_a_tokenizer_that_names_its_class_loads_without_torch(tokenizer: Any, tmp_path: Path) -> None:
    directory = saved_with(tokenizer, tmp_path)
    code = f"from flowrl.models import load_tokenizer\nprint(len(load_tokenizer({str(directory)!r})('ab').input_ids))"
    code += "\nimport sys\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]


def test_the_special_tokens_differ_and_no_character_is_unknown(tokenizer: Any) -> None:
    assert len(tokenizer) == 256 + len(SPECIAL)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    ids = tokenizer("è→", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == "è→"
    assert min(ids) >= len(SPECIAL)


def test_a_prompt_ends_where_the_assistant_begins(tokenizer: Any) -> None:
    text, ids = Chat(tokenizer, "be brief").encode_prompt([{"role": "user", "content": "1+1="}])
    assert text == "<|system|>be brief<|end|><|user|>1+1=<|end|><|assistant|>"
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.int32


def test_every_assistant_turn_and_its_end_are_trained(tokenizer: Any) -> None:
    turns = [("user", "a"), ("assistant", "bc"), ("user", "d")]
    ids, mask = Chat(tokenizer).encode_demonstration([{"role": r, "content": c} for r, c in turns], "ef")
    assert tokenizer.decode(ids) == "<|user|>a<|end|><|assistant|>bc<|end|><|user|>d<|end|><|assistant|>ef<|end|>"
    assert tokenizer.decode(ids[mask]) == "bc<|end|>ef<|end|>"


def test_a_template_that_ends_turns_with_a_newline_trains_up_to_the_end_token(tokenizer: Any) -> None:
    newline = character_tokenizer()
    newline.chat_template = tokenizer.chat_template.replace("<|end|>", "<|end|>\n")
    ids, mask = Chat(newline).encode_demonstration([{"role": "user", "content": "a"}], "b")
    assert newline.decode(ids) == "<|user|>a<|end|>\n<|assistant|>b<|end|>"
    assert newline.decode(ids[mask]) == "b<|end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    strange = character_tokenizer()
    strange.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        Chat(strange).encode_demonstration([{"role": "user", "content": "a"}], "b")


def test_without_a_template_the_last_turn_is_the_prompt() -> None:
    bare = character_tokenizer()
    bare.chat_template = None
    assert Chat(bare).encode_prompt([{"role": "user", "content": "ab"}])[0] == "ab"
    ids, mask = Chat(bare).encode_demonstration([{"role": "user", "content": "ab"}], "c")
    assert bare.decode(ids) == "abc<|end|>"
    assert mask.tolist() == [False, False, True, True]


def test_without_a_template_what_is_trained_begins_as_a_rollout_does() -> None:
    from tokenizers.processors import TemplateProcessing

    begins = character_tokenizer()
    begins.chat_template = None
    begins.backend_tokenizer.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 3)])
    turns = [{"role": "user", "content": "ab"}]
    ids, mask = Chat(begins).encode_completion(turns, "c")
    assert begins.decode(ids) == "<|user|>abc<|end|>" and mask.tolist() == [False, False, False, True, True]
    assert ids[:3].tolist() == Chat(begins).encode_prompt(turns)[1].tolist()


def test_a_model_is_made_once_and_the_others_wait_for_it(cache: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()
    made, told, found = [], [], []

    def make(target: Path) -> None:
        made.append(target)
        begun.set()
        assert go_on.wait(10)
        (target / "model").write_text("whole")

    def get() -> None:
        found.append(cached_model("m", {"a": 1}, make, lambda text: (told.append(text), go_on.set())))  # type: ignore[func-returns-value]

    first, second = threading.Thread(target=get), threading.Thread(target=get)
    first.start()
    assert begun.wait(10)
    second.start()
    first.join(10)
    second.join(10)
    assert len(made) == 1
    assert found[0] == found[1]
    assert (found[0] / "model").read_text() == "whole"
    assert ["waiting for the process" in text for text in told] == [True]
    assert cached_model("m", {"a": 2}, lambda target: None, told.append) != found[0]


def test_a_model_whose_making_fails_leaves_nothing(cache: Path) -> None:
    def make(target: Path) -> None:
        (target / "half").write_text("")
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        cached_model("m", {}, make, print)
    assert [path.suffix for path in (cache / "models").iterdir()] == [".lock"]


def test_what_a_killed_process_left_is_swept(cache: Path) -> None:
    final = cached_model("m", {}, lambda target: None, print)
    leftover = final.parent / f"{final.name}.part-dead"
    leftover.mkdir()
    final.rename(final.parent / "elsewhere")
    assert cached_model("m", {}, lambda target: None, print) == final
    assert not leftover.exists()


@pytest.mark.slow
def test_an_untrained_tiny_loads_as_an_ordinary_model() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve(Policy("tiny"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert 300_000 < sum(p.numel() for p in model.parameters()) < 400_000
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("7+5=\n x", add_special_tokens=False)["input_ids"]) == "7+5=\n x"
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[3, 9, 2]])).logits).all()
    assert resolve(Policy("tiny")) == path


@pytest.mark.slow
def test_a_warm_start_stops_at_its_target_and_leaves_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from flowrl.models import built_in_models

    recipe = Recipe(batch=16, max_steps=300, check_every=20, sampled_target=0.05, greedy_target=0.05)
    monkeypatch.setitem(built_in_models.RECIPES, "tiny", recipe)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    told: list[str] = []
    resolve(Policy("tiny", task=Task("arithmetic:max_value=9")), progress=told.append)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert told[-1].startswith("tiny: SFT step ")
    assert "held-out exact match" in told[-1]


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.timeout(300)
def test_smollm2_converts_and_answers(of_everyone: None) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve(Policy("smollm2"))
    assert context_length(path) == known_context(Policy("smollm2"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    _, ids = Chat(tokenizer).encode_prompt([{"role": "user", "content": "What is the capital of France?"}])
    out = model.generate(torch.tensor(ids[None].astype(np.int64)), max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, len(ids) :])

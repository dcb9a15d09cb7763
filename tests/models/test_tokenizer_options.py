"""Another tokenizer than the model's, and other special tokens: all that load the model have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError
from flowrl.graph.load import load_file
from flowrl.machine.cache import origin_of
from flowrl.models import (
    Policy,
    TokenizerOptions,
    check_model,
    known_tokenizer,
    load_tokenizer,
    require_same_vocabulary,
    resolve,
    tokenizer_of,
    with_special_tokens,
)
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.models.tokens.vocabulary import vocabulary_problem
from flowrl.training.model.policy_model import read_companions

GRAPHS = sorted(path.stem for path in (Path(__file__).parents[2] / "graphs").glob("*.py"))


def chosen(**options: Any) -> TokenizerOptions:
    return TokenizerOptions(**options)


def model(home: Path, *, rows: int = 261, **config: Any) -> Path:
    """A directory that looks like a model of `rows` embeddings, with the tokenizer of the character models."""
    home.mkdir()
    sizes = {"model_type": "qwen2", "vocab_size": rows, "max_position_embeddings": 64, "eos_token_id": 1}
    (home / "config.json").write_text(json.dumps({**sizes, **config}))
    (home / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.5}))
    header = b"{}"
    (home / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    character_tokenizer().save_pretrained(home)
    return home


def read(directory: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / name).read_text())
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_whoever_loads_the_model_has_the_tokens_that_were_chosen(tmp_path: Path) -> None:
    source = model(tmp_path / "model", rows=264)
    options = chosen(eos=("<|user|>", "<|end|>"), pad="<|system|>", bos="<|assistant|>", special=("<think>",))
    policy = Policy(str(source), tokenizer=options)
    check_model(policy)
    directory = Path(resolve(policy))
    for tokenizer in (known_tokenizer(policy), tokenizer_of(policy), load_tokenizer(directory)):
        assert tokenizer is not None
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (3, 2, 4)
        assert tokenizer("<think>a", add_special_tokens=False)["input_ids"] == [261, *tokenizer.encode("a")[1:]]
        assert tokenizer("a")["input_ids"][0] == 4 and len(tokenizer("a")["input_ids"]) == 2
        assert {261, 3, 1} <= set(tokenizer.all_special_ids)
    ids = {"eos_token_id": [3, 1], "pad_token_id": 2, "bos_token_id": 4}
    assert read(directory, "generation_config.json") == {"temperature": 0.5, **ids}
    assert {key: read(directory, "config.json")[key] for key in (*ids, "vocab_size")} == {**ids, "vocab_size": 264}
    assert (directory / "model.safetensors").samefile(source / "model.safetensors")
    assert resolve(policy) == str(directory) and origin_of(directory) == source
    assert "flowrl.json" not in read_companions(directory) and "tokenizer.json" in read_companions(directory)
    assert resolve(Policy(str(source))) == str(source), "another policy has the model as it is"


def test_another_tokenizer_comes_with_its_template_and_ends(tmp_path: Path) -> None:
    source, other = model(tmp_path / "model"), model(tmp_path / "other", model_type="llama")
    tokenizer = character_tokenizer(chat_template="{{ messages[0]['content'] }}?")
    tokenizer.save_pretrained(other)
    policy = Policy(str(source), tokenizer=chosen(name=str(other)))
    directory = Path(resolve(policy))
    assert load_tokenizer(directory).chat_template == "{{ messages[0]['content'] }}?"
    assert read(directory, "config.json")["model_type"] == "qwen2"
    assert read(directory, "config.json")["eos_token_id"] == [1, 2], "the ends that are named beside the tokenizer"
    (other / "generation_config.json").unlink()
    assert read(Path(resolve(policy)), "config.json")["eos_token_id"] == 1, "made again, for its files have changed"


def llama(home: Path) -> Path:
    """A tokenizer whose class has a begin token of its own where the files name none."""
    from transformers import LlamaTokenizer

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁a": 3, "a": 4, "▁": 5}
    LlamaTokenizer(vocab=vocabulary, merges=[("▁", "a")], add_bos_token=True).save_pretrained(home)
    return home


def test_texts_begin_with_the_token_that_was_chosen_or_none(tmp_path: Path) -> None:
    source, other = model(tmp_path / "model", model_type="mistral"), str(llama(tmp_path / "llama"))
    for bos, ids in (("", [1, 3]), ("none", [3]), ("</s>", [2, 3])):
        policy = Policy(str(source), tokenizer=chosen(name=other, bos=bos))
        assert tokenizer_of(policy)("a")["input_ids"] == ids


def test_what_stands_behind_texts_stays() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = character_tokenizer()
    ended = TemplateProcessing(single="$A <|end|>", pair="$A $B", special_tokens=[("<|end|>", 1)])
    tokenizer.backend_tokenizer.post_processor = ended
    with_special_tokens(tokenizer, chosen(bos="<|user|>"), rows=None, model="tiny")
    ids = tokenizer("a")["input_ids"]
    assert (ids[0], ids[-1], len(ids)) == (3, 1, 3)


def test_a_tokenizer_that_the_models_family_does_not_load_is_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    with pytest.raises(ConfigError, match="loads a Qwen2Tokenizer for qwen2 models, and that does not read texts as"):
        check_model(Policy(str(source), tokenizer=chosen(name=str(llama(tmp_path / "llama")))))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"eos": ("<|im_end|>",)},
            "--tokenizer.eos is '<|im_end|>', which is no token of the tokenizer of tiny",
        ),
        ({"pad": "ab"}, "is read as 2 ('a' 'b'); name a token as tokenizer.json has it, or make it one with"),
        ({"bos": "<s>"}, "--tokenizer.bos is '<s>'"),
        ({"special": ("<think>",)}, "ids up to 261 ('<think>'), but the embeddings of tiny have room for 261 tokens"),
        ({"name": "tiny_agent"}, "name the tokenizer that belongs to the model"),
        ({"name": "/nowhere"}, "--tokenizer names '/nowhere', which is no directory on this machine"),
    ],
)
def test_what_the_model_cannot_have_is_refused_before_it_is_made(
    options: dict[str, Any], said: str, cache: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_model(Policy("tiny", tokenizer=chosen(**options)))
    assert said in str(raised.value)
    assert not cache.exists()


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"which holds no tokenizer .* has written"):
        check_model(Policy("tiny", tokenizer=chosen(name=str(tmp_path))))


@pytest.mark.parametrize(("options", "said"), [({"eos": ("",)}, "an empty token"), ({"special": ("a", "a")}, "twice")])
def test_lists_of_tokens_have_each_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen(**options)


def test_other_models_keep_their_tokenizer_and_have_to_have_the_policys(tmp_path: Path) -> None:
    source, teacher = model(tmp_path / "model"), model(tmp_path / "teacher")
    ended = Policy(str(source), tokenizer=chosen(eos=("<|user|>",)))
    assert not ended.with_model(str(teacher)).tokenizer.is_chosen
    assert vocabulary_problem(ended, ended.with_model(str(teacher))) is None
    wider = model(tmp_path / "wider", rows=400)
    policy = Policy(str(wider), tokenizer=chosen(special=("<think>",)))
    with pytest.raises(ConfigError, match="differ, first in '<think>'"):
        require_same_vocabulary(policy, policy.with_model(str(teacher)))
    agent = Policy(str(wider), tokenizer=chosen(name="tiny_agent"))
    assert "differ" in str(vocabulary_problem(agent, agent.with_model(str(teacher))))


def test_the_process_that_tries_parsers_has_the_tokenizer() -> None:
    from dataclasses import asdict

    from flowrl.agents.parser_trial import asked_policy

    options = chosen(eos=("<|user|>", "<|end|>"), pad="<|system|>")
    told = json.loads(json.dumps({"chat_template": "none", "tokenizer": asdict(options)}))
    assert asked_policy("tiny", **told) == Policy("tiny", chat_template="none", tokenizer=options)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_tokenizer_reaches_every_node_with_the_policy(name: str) -> None:
    file = load_file(name)
    given = ("--tokenizer", "smollm2", "--tokenizer.eos", "<|im_end|>", "</s>", "--tokenizer.bos", "none")
    made = file.build(file.parse(given))
    holders = [held for node in made.nodes.values() for held in (node, getattr(node, "data", None))]
    policies = [held.policy for held in holders if isinstance(getattr(held, "policy", None), Policy)]
    wanted = TokenizerOptions("smollm2", eos=("<|im_end|>", "</s>"), bos="none")
    assert {policy.tokenizer for policy in policies if policy.model == "tiny"} <= {wanted}
    assert policies and all(policy.tokenizer in (wanted, TokenizerOptions()) for policy in policies)
    assert wanted in [policy.tokenizer for policy in policies]

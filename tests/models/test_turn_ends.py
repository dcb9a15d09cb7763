"""The end of a turn: trained, and one at which generation stops. Where it is not, this is said before the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.models import Policy, TokenizerOptions, end_problem, resolve, stop_ids, tokenizer_of
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.models.tokens.chat import Chat, template_end
from flowrl.nodes import Demonstrations, Generator, PreferenceDataset, Preferences
from flowrl.tasks import Task
from tests.agents.chat_templates import merging, templates, with_template
from tests.models.test_tokenizer_options import model

ROLES = (  # GLM's form: a turn ends where the next role begins
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OTHER_END = ROLES.replace("{% endfor %}", "<|pad|>\n{% endfor %}")
ASKED = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "one"}, {"role": "user", "content": "r"})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))


def policy(home: Path, template: str | None, stops: Any, *eos: str) -> Policy:
    """A policy with this template, whose generation_config names these ids."""
    source = home / "model"
    if not source.exists():
        model(source)
    character_tokenizer(chat_template=template or "").save_pretrained(source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return Policy(str(source), tokenizer=TokenizerOptions(eos=eos))


def trained(chosen: Policy) -> str:
    tokenizer = tokenizer_of(chosen)
    ids, mask = Chat(tokenizer).encode_demonstration(ASKED, "two")
    return str(tokenizer.decode(ids[mask]))


def test_a_template_without_an_end_is_told_with_an_option_that_trains_one(tmp_path: Path) -> None:
    asis = policy(tmp_path, ROLES, [1, 3])
    assert end_problem(asis) == (
        f"the chat template of {asis.model} writes nothing that ends the assistant's turn, so no answer that is "
        "trained has an end; with --tokenizer.eos '<|user|>' that token ends it, and generation stops there"
    )
    assert trained(asis) == "onetwo"
    mended = policy(tmp_path, ROLES, [1, 3], "<|user|>")
    assert end_problem(mended) is None
    assert trained(mended) == "one<|user|>two<|user|>", "the end of an earlier turn is what begins the next"
    files = Path(resolve(mended))
    assert json.loads((files / "generation_config.json").read_text())["eos_token_id"] == 3, "vLLM stops there"
    assert tokenizer_of(mended).eos_token_id == 3
    other = policy(tmp_path, ROLES, [1, 3], "<|end|>", "<|user|>")
    assert trained(other) == "onetwo<|end|>" and end_problem(other) is None


def test_the_end_is_in_the_template_of_what_is_saved_and_in_no_prompt(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(policy(tmp_path, ROLES, [1, 3], "<|user|>"))
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = character_tokenizer().from_pretrained(tmp_path / "saved")
    assert template_end(saved) == "<|user|>"
    answered = [*ASKED, {"role": "assistant", "content": "two"}]
    assert saved.apply_chat_template(answered, tokenize=False).endswith("<|assistant|>two<|user|>")
    assert saved.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True).endswith("r<|assistant|>")
    assert saved.apply_chat_template(ASKED, tokenize=False).endswith("<|user|>r")


def test_an_end_at_which_generation_does_not_stop_is_told(tmp_path: Path) -> None:
    asis = policy(tmp_path, OTHER_END, 1)
    assert end_problem(asis) == (
        f"the chat template of {asis.model} ends the assistant's turn with '<|pad|>', and generation does not stop "
        "there (it stops at '<|end|>'); with --tokenizer.eos '<|pad|>' '<|end|>' it does"
    )
    mended = policy(tmp_path, OTHER_END, 1, "<|pad|>", "<|end|>")
    assert end_problem(mended) is None
    files = json.loads((Path(resolve(mended)) / "generation_config.json").read_text())
    assert files["eos_token_id"] == [0, 1] == stop_ids(mended, tokenizer_of(mended))
    assert trained(mended) == "one<|pad|>two<|pad|>", "no second end is added"


@pytest.mark.parametrize("stops", [[1, 0], 0, [0]])
def test_every_end_that_the_model_names_counts(tmp_path: Path, stops: Any) -> None:
    assert end_problem(policy(tmp_path, OTHER_END, stops)) is None


def test_without_a_generation_config_the_models_config_counts(tmp_path: Path) -> None:
    asis = policy(tmp_path, OTHER_END, 1)
    (Path(asis.model) / "generation_config.json").unlink()
    assert "it stops at '<|end|>'" in str(end_problem(asis))
    config = json.loads((Path(asis.model) / "config.json").read_text())
    (Path(asis.model) / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 0]}))
    assert end_problem(asis) is None


def test_what_ends_its_turns_is_not_spoken_of(tmp_path: Path) -> None:
    for name in ("tiny", "tiny_agent"):
        assert end_problem(Policy(name)) is None
    bare = policy(tmp_path, None, 1)
    assert end_problem(Policy(bare.model, chat_template="none")) is None, "texts end with the end token"


def test_the_nodes_that_train_or_sample_say_it_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.nodes.sources.given_rows.check_model", lambda policy: None)  # it has no weights
    monkeypatch.setattr("flowrl.nodes.generation.generator.stored_problems", lambda *given: [])
    row = {"prompt": "q", "answer": "a", "chosen": "a", "rejected": "b"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"prompt": f"q{n}"}) + "\n" for n in range(20)))
    task, asis = Task(str(tmp_path / "rows.jsonl")), policy(tmp_path, ROLES, [1, 3])
    told = end_problem(asis)
    assert Demonstrations(task, asis).preflight() == told
    assert PreferenceDataset(Preferences(task, asis)).preflight() == told
    assert PreferenceDataset(Preferences(task, asis, scored=True)).preflight() is None, "it generates nothing"
    assert Generator(asis).preflight() == told


@pytest.mark.parametrize("name", sorted(templates()))
def test_with_the_option_every_template_trains_an_end_once(name: str) -> None:
    """The templates of TRL's wheel; one that cannot be trained on this conversation is refused as before."""
    from flowrl.models import with_template as with_options
    from flowrl.models.tokens.chat import Unrendered

    tokenizer = with_template(merging(), templates()[name])
    own = template_end(tokenizer)
    chosen = Policy("any", tokenizer=TokenizerOptions(eos=("</s>",)))
    tokenizer = with_options(tokenizer, chosen)
    assert template_end(tokenizer) == ("</s>" if own == "" else own)
    try:
        ids, mask = Chat(tokenizer).encode_completion(ASKED, "two")
    except Unrendered as problem:
        assert own is None or "rewrites" in str(problem) or "refuses" in str(problem)
        return
    text = tokenizer.decode(ids[mask])
    assert text.endswith((own or "</s>").strip()) and text.count("</s>") <= 1

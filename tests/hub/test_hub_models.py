"""Models by their name on the Hub: from a local server that speaks its endpoints, and from a cache without one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants as constants
import huggingface_hub.file_download as file_download
import pytest

from flowrl.commands import merge_adapter
from flowrl.errors import ConfigError
from flowrl.hub import HubName, forget_commits, pinned_commits, take_commits
from flowrl.models import (
    Policy,
    TokenizerOptions,
    check_model,
    known_context,
    known_directory,
    known_tokenizer,
    load_tokenizer,
    resolve,
)
from flowrl.models.model_files import model_files
from tests.hub.hub_server import Hub, Repo, serving

TOKEN = "hf_this_is_a_secret"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    forget_commits()
    yield tmp_path / "hub"
    forget_commits()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small model's directory, with what else repositories hold."""
    place = tmp_path_factory.mktemp("model")
    tiny_directory(place)
    found = {path.name: path.read_bytes() for path in place.iterdir()}
    return found | {"README.md": b"# card", "original/consolidated.safetensors": b"x", "model.gguf": b"z"}


def tiny_directory(place: Path, *, safe: bool = True) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from flowrl.models.tokens.characters import character_tokenizer

    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(place)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes))
    model.save_pretrained(place)
    if not safe:
        (place / "model.safetensors").unlink()
        torch.save(model.state_dict(), place / "pytorch_model.bin")


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving({"acme/tiny": Repo(files)}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def refusal(model: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(Policy(model, **options), progress=lambda text: None)
    assert TOKEN not in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_of_another_tokenizer_its_files_alone_come_over(hub: Hub, home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    policy = Policy("tiny", tokenizer=TokenizerOptions("acme/tiny", eos=("<|user|>",)))
    assert known_tokenizer(policy) is None
    check_model(policy, progress=lambda text: None)
    (snapshot,) = (home / "models--acme--tiny" / "snapshots").iterdir()
    assert "tokenizer.json" in os.listdir(snapshot) and not list(snapshot.glob("*.safetensors"))
    assert known_tokenizer(policy).eos_token_id == 3
    assert pinned_commits() == {"model acme/tiny@main": snapshot.name}
    assert "there is no model 'acme/gone'" in refusal("tiny", tokenizer=TokenizerOptions("acme/gone"))


def test_an_adapter_of_the_hub_is_no_model_and_is_merged(hub: Hub, monkeypatch: Any) -> None:
    given = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x", "tokenizer.json": b"{}", "big.bin": b"z"}
    hub.repos["acme/lora"] = Repo(given)
    said = refusal("acme/lora")
    assert "is a PEFT adapter without its base model" in said and "`flowrl merge acme/lora@" in said
    found = merge_adapter._fetch_adapter(said.split("`flowrl merge ")[1].split()[0])
    assert {path.name for path in found.iterdir()} == given.keys() - {"big.bin"}
    assert merge_adapter.adapter_dir(found) == found


def test_names_of_the_hub_have_an_owner_and_maybe_a_revision() -> None:
    assert HubName.parse("Qwen/Qwen3-8B") == HubName("Qwen/Qwen3-8B", "main")
    assert HubName.parse("Qwen/Qwen3-8B@v1.0/x") == HubName("Qwen/Qwen3-8B", "v1.0/x")
    assert str(HubName("a/b", "v1")) == "a/b@v1" and str(HubName("a/b")) == "a/b"
    for text in ("tiny", "./a/b", "/a/b", "~/b", "a/b/c", "a/b@", "a//b", "a/..", "a/b@-x", "a--b/c", "a/b c"):
        assert HubName.parse(text) is None, text


def test_a_model_is_downloaded_once_and_its_commit_is_kept(hub: Hub, home: Path) -> None:
    told: list[str] = []
    assert known_directory(Policy("acme/tiny")) is None and known_context(Policy("acme/tiny")) is None
    directory = Path(resolve(Policy("acme/tiny"), progress=told.append))
    commit = hub.repos["acme/tiny"].commit
    assert directory == home / "models--acme--tiny" / "snapshots" / commit
    assert {path.name for path in directory.iterdir()} == set(model_files(hub.repos["acme/tiny"].files))
    assert not {"README.md", "model.gguf", "original"} & {path.name for path in directory.iterdir()}
    assert told[0].startswith("acme/tiny: downloading") and commit[:10] in told[0]
    assert pinned_commits() == {"model acme/tiny@main": commit}
    asked = len(hub.asked)
    assert resolve(Policy("acme/tiny")) == str(directory) and len(hub.asked) == asked
    assert known_directory(Policy("acme/tiny")) == directory and known_context(Policy("acme/tiny")) == 32768
    assert load_tokenizer(directory)("ab").input_ids
    assert any(TOKEN in token for _, token in hub.asked)


def test_another_process_of_the_run_uses_the_commit_that_the_first_found(hub: Hub) -> None:
    first = resolve(Policy("acme/tiny"))
    found = pinned_commits()
    hub.repos["acme/tiny"].files["config.json"] += b"\n"  # the branch moves on
    forget_commits()
    take_commits(found)
    asked = len(hub.asked)
    assert resolve(Policy("acme/tiny")) == first and len(hub.asked) == asked
    forget_commits()
    assert resolve(Policy("acme/tiny")) != first


def test_a_pinned_commit_is_what_another_machine_downloads(hub: Hub, home: Path) -> None:
    first = resolve(Policy("acme/tiny"))
    shutil.rmtree(home)
    assert resolve(Policy("acme/tiny")) == first
    assert resolve(Policy(f"acme/tiny@{Path(first).name}")) == first


def test_without_the_network_the_cache_answers_by_name(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(Policy("acme/tiny"))
    forget_commits()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert resolve(Policy("acme/tiny")) == first and len(hub.asked) == asked
    assert "HF_HUB_OFFLINE is set, and it is not in the cache" in refusal("acme/other")
    (Path(first) / "model.safetensors").unlink()
    assert "HF_HUB_OFFLINE is set, and only some of its files are in the cache" in refusal("acme/tiny")


def test_a_cache_that_another_program_has_made_is_read_by_name(
    files: dict[str, bytes], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789" * 4
    snapshot = home / "models--acme--laid" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in model_files(files):
        (snapshot / name).write_bytes(files[name])
    refs = home / "models--acme--laid" / "refs" / "main"
    refs.parent.mkdir()
    refs.write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_model(Policy("acme/laid"))
    assert resolve(Policy("acme/laid")) == str(snapshot)
    assert pinned_commits() == {"model acme/laid@main": commit}


def test_a_hub_that_does_not_answer_is_no_obstacle_to_what_is_cached(hub: Hub) -> None:
    first, told = resolve(Policy("acme/tiny")), list[str]()
    forget_commits()
    hub.repos["acme/tiny"].refused = 503
    assert resolve(Policy("acme/tiny"), progress=told.append) == first
    assert told == [f"acme/tiny: the Hub does not answer, so the commit {Path(first).name[:10]} in the cache is used"]


def test_what_the_hub_refuses_is_one_sentence_with_the_remedy(hub: Hub, files: dict[str, bytes]) -> None:
    hub.repos["acme/gated"] = Repo(files, refused=403, error_code="GatedRepo")
    hub.repos["acme/private"] = Repo(files, refused=401)
    hub.repos["acme/busy"] = Repo(files, refused=429)
    hub.repos["acme/down"] = Repo(files, refused=500)
    assert f"is gated; ask for access at {hub.url}/acme/gated, then log in with" in refusal("acme/gated")
    assert "log in with `hf auth login`, or set HF_TOKEN" in refusal("acme/private")
    assert "too many requests" in refusal("acme/busy")
    assert "answered with status 500; try again later" in refusal("acme/down")
    assert "neither a model directory on this machine nor public at" in refusal("acme/none")
    assert "acme/tiny has no revision 'v9'" in refusal("acme/tiny@v9")


def test_a_lost_connection_is_told_and_what_came_is_kept(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda s: None, time=file_download.time.time))
    hub.repos["acme/tiny"].lost_after = 1000
    assert f"the connection to {hub.url} was lost" in refusal("acme/tiny")
    hub.repos["acme/tiny"].lost_after = None
    assert (Path(resolve(Policy("acme/tiny"))) / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_server_that_is_not_there_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://user:pass@127.0.0.1:9")
    text = refusal("acme/tiny")
    assert "the connection to http://127.0.0.1:9 was lost" in text and "pass" not in text


def test_a_disk_without_room_is_told_before_anything_is_downloaded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    assert "whose disk has 0.0 MB left; make room, or set HF_HOME" in refusal("acme/tiny")
    assert not [what for what, _ in hub.asked if "/resolve/" in what]


def test_a_disk_that_fills_up_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flowrl.hub._download_files", full)
    assert "is full; make room, or set HF_HOME" in refusal("acme/tiny")


def test_weights_in_one_format_are_chosen() -> None:
    both = ["config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin", "tokenizer.model", "x/y.json"]
    assert model_files(both) == ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model"]
    pickled = ["config.json", "pytorch_model-00001-of-00002.bin", "training_args.bin", "tf_model.h5"]
    assert model_files(pickled) == ["config.json", "pytorch_model-00001-of-00002.bin"]
    assert model_files(["consolidated.safetensors", "adapter_model.safetensors"]) == []


def test_pickled_weights_load_and_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    from flowrl.training.model.policy_model import load_policy_model

    safe, pickled = tmp_path / "safe", tmp_path / "pickled"
    tiny_directory(safe)
    tiny_directory(pickled, safe=False)
    check_model(Policy(str(pickled)))
    ours, theirs = (dict(load_policy_model(place).network.named_parameters()) for place in (pickled, safe))
    assert ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)
    data = (pickled / "pytorch_model.bin").read_bytes()
    (pickled / "pytorch_model.bin").write_bytes(data[: len(data) // 2])
    assert "is cut off, or was written before torch 1.6" in refusal(str(pickled))


def test_code_of_a_model_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    from flowrl.training.model.policy_model import load_policy_model
    from flowrl.training.model.trainable import check_policy

    tiny_directory(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "class Config(Qwen2Config):\n    model_type = 'own'\n"
        "class Model(Qwen2ForCausalLM):\n    config_class = Config\n"
    )
    assert "read them, then add --trust-remote-code" in refusal(str(tmp_path))
    check_model(Policy(str(tmp_path), trust_remote_code=True))
    check_policy(tmp_path, trust_remote_code=True)
    model = load_policy_model(tmp_path, trust_remote_code=True)
    assert type(model.network).__name__ == "Model" and type(model.network).__module__.startswith("transformers_modules")


def test_an_adapter_of_a_model_on_the_hub_names_its_commit_and_finds_its_base(hub: Hub, tmp_path: Path) -> None:
    from flowrl.commands.merge_adapter import base_of
    from flowrl.hub import name_of_snapshot

    base = Path(resolve(Policy("acme/tiny")))
    assert name_of_snapshot(base) == HubName("acme/tiny", base.name) and name_of_snapshot(tmp_path / "model") is None
    described = {"base_model_name_or_path": "acme/tiny", "revision": base.name}
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    hub.repos["acme/tiny"].files["config.json"] += b"\n"  # the branch moves on
    forget_commits()
    assert base_of(tmp_path, "") == base
    assert base_of(tmp_path, "acme/tiny") != base, "the one that is named, as it is now"

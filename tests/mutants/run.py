"""Faults put into flowrl one at a time, each to be caught by the test that it names: python -m tests.mutants.run

The faults are in tests/mutants/table: each changes one line of a function, which is found by its name.

Nothing is changed in the working tree: tests run in a copy. First they all have to pass there, since a
test that always fails kills nothing. Processes are forked from one that has the heavy imports done.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from tests.mutants import table
from tests.mutants.mutant import Mutant, NoPlaceError

ROOT = Path(__file__).parents[2]
PACKAGES = ("flowrl", "graphs", "tests", "benchmarks")
IMPORTS = ("torch", "transformers", "hypothesis", "numpy", "pytest")
FAILED, PASSED = 1, 0
"""Exit codes of pytest; another one, such as for an error while collecting, is no verdict."""


def mutants() -> list[Mutant]:
    """All of them, by name."""
    tables = [
        importlib.import_module(f"{table.__name__}.{module.name}") for module in pkgutil.iter_modules(table.__path__)
    ]
    return sorted((mutant for each in tables for mutant in each.MUTANTS), key=lambda mutant: mutant.name)


def copy_tree(target: Path) -> None:
    """What tests need, without compiled files: those of a changed line could pass for the old one's."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, target / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "pyproject.toml", target / "pyproject.toml")


def run_tests(tree: Path, tests: Sequence[str], log: Path) -> int:
    """pytest's exit code for `tests` in `tree`, in a process of their own."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 99
    try:
        with log.open("w") as output, redirect_stdout(output), redirect_stderr(output):
            code = _pytest(tree, tests)
    finally:
        os._exit(code)


def _pytest(tree: Path, tests: Sequence[str]) -> int:
    import pytest

    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
        del sys.modules[name]
    importlib.invalidate_caches()
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests]))


def verdict(mutant: Mutant, tree: Path, log: Path) -> str:
    """ "killed", or what else became of it."""
    try:
        path, text = mutant.put_into(tree)
    except NoPlaceError as error:
        return f"does not apply: {error}"
    unchanged = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    code = run_tests(tree, [mutant.test], log)
    path.write_text(unchanged, encoding="utf-8")
    if code == FAILED:
        return "killed"
    return "SURVIVED" if code == PASSED else f"no verdict (pytest ended with {code}), see {log}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Each fault has to be caught by the test that it names.")
    parser.add_argument("names", nargs="*", help="mutants to run; all by default")
    parser.add_argument("--logs", type=Path, help="keep pytest's output in this directory")
    chosen = parser.parse_args()
    selected = [m for m in mutants() if not chosen.names or m.name in chosen.names]
    unknown = set(chosen.names) - {m.name for m in selected}
    if unknown or not selected:
        sys.exit(f"no such mutant: {', '.join(sorted(unknown)) or 'none at all'}")
    for module in IMPORTS:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="flowrl-mutants-") as scratch:
        logs = chosen.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        return _run(selected, Path(scratch) / "tree", logs)


def _run(selected: Sequence[Mutant], tree: Path, logs: Path) -> int:
    tree.mkdir()
    copy_tree(tree)
    start = time.monotonic()
    code = run_tests(tree, sorted({m.test for m in selected}), logs / "unchanged.log")
    if code != PASSED:
        print((logs / "unchanged.log").read_text()[-4000:])
        print("the tests have to pass before a fault is put in")
        return 1
    print(f"{len(selected)} mutants; unchanged, their tests pass ({time.monotonic() - start:.0f} s)", flush=True)
    survivors = 0
    for mutant in selected:
        begun = time.monotonic()
        found = verdict(mutant, tree, logs / f"{mutant.name}.log")
        survivors += found != "killed"
        print(f"{found:10} {mutant.name:32} {time.monotonic() - begun:5.1f} s  {mutant.fault}", flush=True)
    print(f"{len(selected) - survivors} of {len(selected)} killed in {time.monotonic() - start:.0f} s")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())

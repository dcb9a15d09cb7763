"""The faults of `make mutants` are what they say: one line of flowrl each, and a test that exists."""

from __future__ import annotations

import ast
import difflib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant, NoPlaceError
from tests.mutants.run import ROOT, mutants

ALL = mutants()


def test_there_are_enough_and_no_fault_is_told_twice() -> None:
    assert len(ALL) >= 25
    assert len({mutant.fault for mutant in ALL}) == len({mutant.name for mutant in ALL}) == len(ALL)


@pytest.mark.parametrize("mutant", ALL, ids=[mutant.name for mutant in ALL])
def test_a_mutant_is_one_line_of_flowrl_and_names_a_test(mutant: Mutant) -> None:
    try:
        module, text = mutant.put_into(ROOT)
    except NoPlaceError as error:
        pytest.fail(f"{mutant.name} has to be written again for the code as it is now: {error}")
    ast.parse(text)
    compared = list(difflib.ndiff(module.read_text().splitlines(), text.splitlines()))
    assert sum(line.startswith("+ ") for line in compared) == 1
    assert sum(line.startswith("- ") for line in compared) <= 1
    path, _, name = mutant.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()


def test_cases_that_mutants_name_exist() -> None:
    """A name in brackets is one of a parametrized test's cases."""
    named = {mutant.test for mutant in ALL if "[" in mutant.test}
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert not named - set(done.stdout.splitlines())


CODE = """
BOUND = 3

def outer(x):
    def inner(x):
        return x + 1
    return inner(x) + 2

class Sum:
    start = 0

    @property
    def total(self):
        return self.start + 2

    def next(self):
        return self.start + 2
"""


def put(tree: Path, function: str, before: str) -> tuple[str, str]:
    """The module that has the place, and the line that the fault makes of it."""
    (tree / "flowrl" / "deep").mkdir(parents=True)
    (tree / "flowrl" / "deep" / "code.py").write_text(CODE)
    (tree / "flowrl" / "other.py").write_text("def other(x):\n    return x + 2\n\n\nclass Other(Sum): ...\n")
    path, text = Mutant("m", "", function, before, "FAULT", "").put_into(tree)
    (line,) = (line.strip() for line in text.splitlines() if "FAULT" in line)
    return path.name, line


@pytest.mark.parametrize(
    ("function", "before", "line"),
    [
        ("Sum.next", "self.start + 2", "return FAULT"),
        ("Sum.total", "@property", "FAULT"),
        ("outer.inner", "x + 1", "return FAULT"),
        ("Sum", "start = 0", "FAULT"),
        ("BOUND", "3", "BOUND = FAULT"),
    ],
)
def test_a_place_is_found_by_the_name_of_its_function(tmp_path: Path, function: str, before: str, line: str) -> None:
    assert put(tmp_path, function, before) == ("code.py", line)


@pytest.mark.parametrize(
    ("function", "before", "found"),
    [
        ("Sum.next", "x + 1", "found no place"),
        ("Sum.gone", "self.start", "found no place"),
        ("next", "self.start", "found no place"),
        ("Sum", "self.start + 2", "found flowrl/deep/code.py, flowrl/deep/code.py"),
    ],
)
def test_a_fault_without_one_place_is_told(tmp_path: Path, function: str, before: str, found: str) -> None:
    with pytest.raises(NoPlaceError, match=found):
        put(tmp_path, function, before)


def test_a_function_may_move_but_not_be_there_twice(tmp_path: Path) -> None:
    put(tmp_path, "outer", "inner(x) + 2")
    (tmp_path / "moved").mkdir()
    moved = tmp_path / "moved" / "graphs" / "new.py"
    moved.parent.mkdir()
    moved.write_text(CODE)
    mutant = Mutant("m", "", "outer", "inner(x) + 2", "FAULT", "")
    assert mutant.put_into(tmp_path / "moved")[0] == moved
    (moved.parent / "copy.py").write_text(CODE)
    again = moved.parents[1].rename(tmp_path / "again")
    with pytest.raises(NoPlaceError, match=r"found graphs/copy.py, graphs/new.py"):
        mutant.put_into(again)

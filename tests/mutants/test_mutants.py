"""The faults of `make mutants` are what they say: one line of flowrl each, and a test that exists."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.mutants.run import ROOT, Mutant, mutants

ALL = mutants()


def changes(mutant: Mutant, sign: str) -> list[str]:
    """Lines that the patch adds or removes."""
    lines = mutant.patch.read_text().splitlines()
    return [line for line in lines if line.startswith(sign) and not line.startswith(sign * 3)]


def test_there_are_enough_and_no_fault_is_told_twice() -> None:
    assert len(ALL) >= 25
    assert len({mutant.fault for mutant in ALL}) == len(ALL)


@pytest.mark.parametrize("mutant", ALL, ids=[mutant.name for mutant in ALL])
def test_a_mutant_is_one_line_of_flowrl_and_names_a_test(mutant: Mutant) -> None:
    assert len(changes(mutant, "+")) == 1 and len(changes(mutant, "-")) <= 1
    assert "--- a/flowrl/" in mutant.patch.read_text()
    problem = mutant.apply(ROOT, check=True)
    assert not problem, f"{mutant.patch} has to be made again for the code as it is now: {problem}"
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

"""The tables of what `make test` leaves to `make matrices` and of its order name files, tests and cases that exist."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import EARLY, SPREAD, THOROUGH
from tests.house.further_cases import FURTHER, KEPT, chosen, further, unknown

TESTS = Path(__file__).parents[1]


def functions(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    (path,) = TESTS.rglob(f"test_{file}.py")
    tree = ast.parse(path.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("file", KEPT)
def test_tests_that_are_named_exist(file: str) -> None:
    assert KEPT[file].keys() <= functions(file).keys()


@pytest.mark.parametrize("file", KEPT)
def test_no_file_is_left_out_whole(file: str) -> None:
    tests = {name for name in functions(file) if name.startswith("test_")}
    assert tests - {name for name, kept in KEPT[file].items() if not kept}


def test_files_that_have_a_place_of_their_own_exist() -> None:
    files = {path.name for path in TESTS.rglob("test_*.py")}
    assert {*EARLY, *SPREAD, *(f"test_{name}.py" for name in THOROUGH)} <= files
    assert len(set(EARLY)) == len(EARLY)


def item(name: str, file: str = "test_tune.py", **params: Any) -> Any:
    found = SimpleNamespace(name=name, path=TESTS / file)
    return SimpleNamespace(**vars(found), callspec=SimpleNamespace(params=params)) if params else found


def left(items: list[Any]) -> list[str]:
    return [one.name for one in further(items)]


def test_cases_are_kept_by_number_by_name_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"test_numbered": 3, "test_named": ("a-*", "b"), "test_whole": ()}
    monkeypatch.setitem(KEPT, "tune", kept)
    assert left([item(f"test_numbered[{n}]", n=n) for n in range(7)]) == [f"test_numbered[{n}]" for n in (1, 2, 4, 5)]
    named = [item(f"test_named[{n}]", n=n) for n in ("a-1", "a", "b", "b-1")]
    assert left(named) == ["test_named[a]", "test_named[b-1]"]
    assert left([item("test_whole"), item("test_other"), item("test_numbered", "test_elsewhere.py")]) == ["test_whole"]


def test_names_of_no_case_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KEPT, "tune", {"test_named": ("a-*", "b"), "test_numbered": 3, "test_whole": ()})
    monkeypatch.setitem(FURTHER, "tune", frozenset({"c", "d"}))
    items = [item("test_named[a-1]", n=1), item("test_numbered[2]", n=2), item("test_of[c]", case="c")]
    assert list(unknown(items)) == ["tune: test_named[b]", "tune: d"]
    items = [item("test_named[a-1]"), item("test_named[b]"), item("test_of[d-c]", one="d", other="c")]
    assert list(unknown(items)) == []


def test_a_gang_trains_the_cases_whose_tests_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FURTHER, "tune", frozenset({"b", "c"}))
    asked = [item("test_x[a]", case=SimpleNamespace(name="a")), item("test_x[b]", case="b")]
    elsewhere = item("test_x[c]", "test_elsewhere.py", case="c")
    assert left([*asked, elsewhere]) == ["test_x[b]"]
    request: Any = SimpleNamespace(session=SimpleNamespace(items=[*asked, elsewhere]), path=TESTS / "test_tune.py")
    assert chosen(request, ["a", "b", "c", "d"]) == ["a", "b", "d"]

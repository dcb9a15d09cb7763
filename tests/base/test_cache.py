"""The cache of directories after processes that were killed, beside other users, and while it is cleaned."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

from flowrl.machine.cache import RECIPE, cached_directory

GUEST = 65534
"""Of the user `nobody`."""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of one kind, in a place that other users may reach."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        monkeypatch.setenv("FLOWRL_CACHE", place)
        yield Path(place) / "rows"


def filled(directory: Path) -> None:
    (directory / "rows").write_text("whole")


def asked(name: str, make: Callable[[Path], None] = filled, days: int | None = 30) -> tuple[Path, list[str]]:
    """A directory of the cache, and what was said."""
    said: list[str] = []
    return cached_directory("rows", name, {}, make, said.append, unused_days=days), said


def aged(path: Path, days: float) -> Path:
    os.utime(path, (then := time.time() - days * 86400, then))
    return path


@contextmanager
def guest() -> Iterator[None]:
    """A user to whom modes of files apply."""
    if os.geteuid():
        yield
        return
    os.seteuid(GUEST)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_removal_that_is_cut_off_leaves_nothing_that_counts_as_complete(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = asked("old")[0]
    aged(old / RECIPE, 31)

    def cut_off(path: str | Path, *args: object, **options: object) -> None:
        if Path(path).exists():
            assert not old.exists(), "its name is gone before anything in it"
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", cut_off)
        with pytest.raises(KeyboardInterrupt):
            asked("new")
    assert [path.name.partition(".part-removed-")[0] for path in home.glob("*.part-*")] == [old.name]
    assert asked("old")[0] == old and (old / "rows").read_text() == "whole"
    assert not list(home.glob("*.part-*"))


@pytest.mark.parametrize("days", [30, None])
def test_a_directory_without_its_recipe_is_made_again(days: int | None, home: Path) -> None:
    whole = asked("a", days=days)[0]
    (whole / RECIPE).unlink()
    (whole / "rows").write_text("ha")
    assert asked("a", days=days) == (whole, [])
    assert (whole / "rows").read_text() == "whole" and (whole / RECIPE).is_file()


def test_who_may_only_read_the_cache_uses_what_is_there(home: Path) -> None:
    whole = asked("a")[0]
    aged(whole / RECIPE, 2)
    for path, mode in ((home / f"{whole.name}.lock", 0o444), (whole / RECIPE, 0o444), (home, 0o555)):
        path.chmod(mode)
    with guest():
        assert asked("a", pytest.fail) == (whole, [])
        with pytest.raises(PermissionError, match="lock"):
            asked("b", pytest.fail)
    (home / f"{whole.name}.lock").chmod(0o666)
    with guest():
        assert asked("a", pytest.fail) == (whole, []), "the lock may be taken, and the time not changed"
    home.chmod(0o755)


def test_what_another_user_has_made_stays_and_is_said(home: Path) -> None:
    old = [asked(name)[0] for name in "ab"]
    for path in old:
        aged(path / RECIPE, 31)
    lock = home / f"{old[0].name}.lock"
    lock.chmod(0o444)
    (home / f"{old[1].name}.lock").chmod(0o666)
    home.chmod(0o1777)
    with guest():
        new, said = asked("new")
    assert (new / "rows").read_text() == "whole" and old[0].is_dir()
    assert said[0] == f"{old[0]} is kept because it cannot be removed: Permission denied"
    if not os.geteuid():
        assert said[1] == f"{old[1]} is kept because it cannot be removed: Operation not permitted"
        assert (old[1] / RECIPE).is_file() and len(said) == 2


def test_what_killed_processes_left_is_removed_when_another_is_made(home: Path) -> None:
    names = ["fresh", "held", "of.part-1.gz", "old", "stale", "without", "young"]
    whole = {name: asked(name)[0] for name in names}
    lock = {name: Path(f"{whole[name]}.lock") for name in names}
    left = {name: whole[name].rename(f"{whole[name]}.part-x") for name in ("held", "old", "young")}
    (whole["without"] / RECIPE).unlink()
    for name in ("fresh", "stale"):
        shutil.rmtree(whole[name])
    for path in (left["held"], left["old"], whole["without"], lock["stale"], whole["of.part-1.gz"]):
        aged(path, 31)
    for path in (left["young"], lock["fresh"]):
        aged(path, 29)
    with FileLock(lock["held"]):
        said = asked("new")[1]
    killed = "is removed: a process that was killed left it"
    assert said == [f"{left['old']} {killed}", f"{whole['without']} {killed}"]
    assert set(home.glob("*.part-x")) == {left["held"], left["young"]}
    assert whole["of.part-1.gz"].is_dir(), "a directory may be named as what is left is"
    assert {name for name in names if not lock[name].exists()} == {"old", "stale", "without"}
    assert asked("old")[0] == whole["old"]


def test_directories_that_stay_for_good_are_not_removed_but_what_is_left_of_others_is(home: Path) -> None:
    whole, part = asked("a", days=None)[0], asked("b", days=None)[0]
    aged(whole / RECIPE, 400)
    part.rename(left := part.with_name(f"{part.name}.part-x"))
    aged(left, 31)
    asked("c", days=None)
    assert whole.is_dir() and not left.exists()

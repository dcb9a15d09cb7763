"""Going on with a run: what of it may change, which checkpoint is taken, and when its files are touched."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError, FlowrlError
from flowrl.runtime.checkpoints import checkpoint, resume
from flowrl.runtime.checkpoints.rundir import RunDir
from flowrl.runtime.driver.driver import Driver
from flowrl.runtime.ledger.ledger_file import Terms
from flowrl.testing import GraphRun, run_graph
from tests.rigs.in_process import seeing_the_driver

STAGES = Path(__file__).parent / "graphs_resumed" / "stages.py"
BEGUN = {"steps": 6, "save_every": 3}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a run of six steps with these options, which stops with checkpoints of steps 3 and 6."""

    def begin(**config: Any) -> Path:
        directory = tmp_path_factory.mktemp("begun") / "run"
        run_graph(STAGES, directory, config, **BEGUN)
        return directory

    return begin


def go_on(directory: Path, *, steps: int = 12, **config: Any) -> GraphRun:
    return run_graph(STAGES, directory, config, steps=steps, resume=True, save_every=3, must_succeed=False)


def records(directory: Path) -> dict[str, bytes]:
    """Every file of a run but its lock and trace, by name."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name not in (".lock", "trace.json"))
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# What may change


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "group_size": ({}, {"group_size": 3}, "group_size is 3 and was 2: groups in flight have that many members"),
    "more groups a batch": ({}, {"groups_per_step": 4}, "groups_per_batch is 4 and was 2"),
    "fewer groups a batch": ({"groups_per_step": 4}, {}, "groups_per_batch is 2 and was 4"),
    "smaller staleness": ({"staleness": 2}, {}, "max_staleness is 1 and was 2"),
    "fewer tickets": ({"staleness": 3}, {"staleness": 3, "look_ahead": 3}, "tickets is 6 and was 8"),
    "wait after mask": ({"mask": True}, {}, 'on_limit is "wait" and was "mask"'),
    "replicas with state": (
        {"collector": "remembering"},
        {"collector": "remembering", "collectors": 2},
        "node 'collect' has 2 replicas and had 1, each with a state of its own",
    ),
    "another consumer of a broadcast": (
        {"taps": 1},
        {"taps": 2},
        "node 'tap' has 2 replicas and had 1, each with messages in flight that only it gets",
    ),
    "another dispatch": (
        {"taps": 2},
        {"taps": 2, "tapping": "share"},
        'generator.samples -> tap.samples has dispatch="share" and had "broadcast"',
    ),
    "another edge": (
        {"taps": 1},
        {},
        "another graph (generator.samples -> tap.samples is in only one of the two)",
    ),
    "another node with state": (
        {"collector": "remembering"},
        {},
        "node 'collect' is a Collect and was a Remembering, and the checkpoint has the state of the latter",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_would_break_a_promise_is_refused_by_name(begun: Callable[..., Path], name: str) -> None:
    before, now, text = CHANGES[name]
    directory = begun(**before)
    found = records(directory)
    with pytest.raises(ConfigError, match="--resume: the run cannot continue from step_000006") as refusal:
        go_on(directory, **now)
    assert text in str(refusal.value)
    assert records(directory) == found
    go_on(directory, **before).raise_for_error()


def test_all_that_is_in_the_way_is_said_at_once(begun: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError) as refusal:
        run_graph(STAGES, begun(), {"group_size": 3, "groups_per_step": 3}, steps=12, resume=True, seed=4)
    assert str(refusal.value).count("\n- ") == 3
    assert "--seed is 4 and was 0" in str(refusal.value)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {"staleness": 3}),
        ({}, {"staleness": 2, "look_ahead": 3}),
        ({"staleness": 2, "look_ahead": 3}, {"staleness": 2}),
        ({}, {"mask": True}),
        ({}, {"generators": 3}),
        ({"generators": 3, "collectors": 3}, {}),
        ({"taps": 3, "tapping": "share"}, {"taps": 1, "tapping": "share"}),
    ],
    ids=str,
)
def test_what_may_change_does_and_every_promise_is_kept(
    begun: Callable[..., Path], before: dict[str, Any], now: dict[str, Any]
) -> None:
    ran = go_on(begun(**before), **now).raise_for_error()
    assert ran.outcome is not None and ran.outcome.steps == 12
    assert (report := ran.audit()).ok, str(report)
    assert report.figures["groups"] == 12 * 2


# Which checkpoint


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(begun: Callable[..., Path]) -> None:
    directory = begun()
    (directory / "checkpoints" / "step_000006" / "state.msgpack").write_bytes(b"cut")
    (directory / "best.json").write_text(json.dumps({"step": 6, "score": 1.0, "checkpoint": "checkpoints/step_000006"}))
    ran = go_on(directory, steps=9).raise_for_error()
    assert "driver: resumed from step_000003" in "\n".join(ran.view.lines)
    assert ran.audit().ok and ran.steps == list(range(4, 10))
    names = sorted(path.name for path in (directory / "checkpoints").iterdir())
    assert names == ["step_000006", "step_000006.damaged", "step_000009"]
    assert not (directory / "best.json").exists(), "it named what is no more"


def test_nothing_is_touched_where_no_checkpoint_is_whole(begun: Callable[..., Path]) -> None:
    directory = begun()
    for path in (directory / "checkpoints").iterdir():
        (path / "state.msgpack").write_bytes((path / "state.msgpack").read_bytes()[:-1])
    found = records(directory)
    with pytest.raises(ConfigError, match="no undamaged checkpoint left"):
        go_on(directory)
    assert records(directory) == found


# When files are touched


def test_a_run_that_cannot_begin_leaves_its_records_as_they_were(begun: Callable[..., Path]) -> None:
    directory = begun()
    (directory / "checkpoints" / "step_000006" / "manifest.json").unlink()
    found = records(directory)
    ran = go_on(directory, collector="failing")
    assert "ValueError: no such device" in str(ran.error)
    assert records(directory) == found


class Killed(BaseException):
    """The process is dead: from the call that raised it on nothing reaches the disk."""


@contextmanager
def killed_at(number: int) -> Iterator[list[str]]:
    """The change of a name in the file system with this number does not happen, nor does any later one."""
    asked: list[str] = []

    def guarded(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            asked.append(name)
            if len(asked) > number:
                raise Killed(name)
            return change(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, guarded(name, getattr(os, name)))
        yield asked


def test_wherever_the_way_back_is_killed_the_run_can_go_on(begun: Callable[..., Path]) -> None:
    """And no fresh run is let into its directory."""
    directory = begun()
    (directory / "checkpoints" / "step_000006" / "state.msgpack").unlink()
    for number in range(100):
        version, path = newest(directory)
        assert version == 3
        try:
            with killed_at(number) as asked:
                resume.rewind_run(directory, path, version, Terms.read(directory))
        except Killed:
            with pytest.raises(ConfigError, match="continue it with --resume"):
                RunDir(directory).claim(resume=False)
            continue
        break
    assert number == len(asked) >= 3
    assert go_on(directory, steps=9).raise_for_error().audit().ok


def newest(directory: Path) -> tuple[int, Path]:
    claimed = RunDir(directory)
    claimed.claim(resume=True)
    try:
        return claimed.newest_checkpoint()
    finally:
        claimed.release()


def test_a_fresh_run_whose_nodes_cannot_be_set_up_has_no_records_to_go_on_from(tmp_path: Path) -> None:
    ran = run_graph(STAGES, tmp_path / "run", {"collector": "failing"}, must_succeed=False, **BEGUN)
    assert "no such device" in str(ran.error)
    assert not (tmp_path / "run" / "ledger.sqlite").exists()
    run_graph(STAGES, tmp_path / "run", **BEGUN)


# A run that ends while a checkpoint is published


@pytest.mark.parametrize("step", [3, 6])
@pytest.mark.parametrize("point", ["write_manifest 0", "fsync 0", "fsync 3", "replace 0", "fsync 4"])
def test_a_run_that_ends_while_it_publishes_leaves_a_whole_checkpoint_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, point: str
) -> None:
    """The thread is told to stop, and waited for; at step 6 it works for the end of the run, at 3 for the trainers."""
    name, _, number = point.partition(" ")
    told: list[bool] = []
    publish = checkpoint.publish_checkpoint

    def prepare(driver: Driver) -> None:
        loop = asyncio.get_running_loop()

        def published(temporary: Path, final: Path, facts: Any, stop: threading.Event) -> None:
            if final.name != f"step_{step:06d}":
                publish(temporary, final, facts, stop)
                return

            def crash() -> None:
                loop.call_soon_threadsafe(driver.fail, FlowrlError("the end"))
                told.append(stop.wait(20))

            with before(name, int(number), crash):
                publish(temporary, final, facts, stop)

        monkeypatch.setattr(checkpoint, "publish_checkpoint", published)

    with seeing_the_driver(prepare):
        ran = run_graph(STAGES, tmp_path / "run", steps=6, save_every=3, must_succeed=False)
    assert (str(ran.error), told) == ("the end", [True])
    checkpoints = tmp_path / "run" / "checkpoints"
    expected = step if name == "replace" or point == "fsync 4" else step - 3
    assert [path.name for path in checkpoints.iterdir() if path.name.startswith(".")] == []
    assert [found for found, _ in checkpoint.steps_of(checkpoints)] == [n for n in (3, 6) if n <= expected]
    for _, path in checkpoint.steps_of(checkpoints):
        checkpoint.verify_files(path)


@contextmanager
def before(name: str, number: int, crash: Callable[[], None]) -> Iterator[None]:
    """Call `crash` in the place of a checkpoint's `fsync`, `replace` or manifest `write` with this number."""
    owner: Any = checkpoint if name == "write_manifest" else os
    change, calls = getattr(owner, name), iter(range(1000))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            crash()
        return change(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield

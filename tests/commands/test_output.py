"""Standard output without a reader: a run goes on without its view, a command that prints for a reader ends quietly."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from flowrl.cli import main
from flowrl.graph.analysis.plan import make_plan
from flowrl.runtime.driver.job import RunOptions
from flowrl.runtime.driver.launch import Launch
from flowrl.runtime.samples.rollout_files import write_rollouts
from flowrl.runtime.telemetry.view import LiveView, PlainView, View
from tests.commands.test_samples import row
from tests.graph.graph_nodes import MACHINE, grpo

ROOT = Path(__file__).parents[2]


class Output:
    """A standard output that is written, until `end` takes its reader away."""

    def __init__(self, stream: TextIO, reader: int | None) -> None:
        self.stream = stream
        self._reader = reader

    def end(self) -> None:
        if self._reader is not None:
            os.close(self._reader)
            self._reader = None


def closed_pipe() -> Output:
    reader, writer = os.pipe()
    return Output(os.fdopen(writer, "w"), reader)


def gone_terminal() -> Output:
    reader, writer = os.openpty()
    return Output(os.fdopen(writer, "w"), reader)


def full_disk() -> Output:
    return Output(Path("/dev/full").open("w"), None)


@pytest.fixture
def output(request: pytest.FixtureRequest) -> Iterator[Output]:
    made: Output = request.param()
    yield made
    made.end()
    made.stream.close()


def opened_view(run_dir: Path) -> View:
    graph = grpo().graph
    return Launch(run_dir / "grpo.py", graph, None, RunOptions(steps=2))._open_view(make_plan(graph, MACHINE), run_dir)


@pytest.mark.parametrize(
    ("output", "kind", "why"),
    [
        (closed_pipe, PlainView, "Broken pipe"),
        (full_disk, PlainView, "No space left on device"),
        (gone_terminal, LiveView, "Input/output error"),
    ],
    indirect=["output"],
)
def test_a_run_goes_on_when_nobody_can_read_it(
    output: Output, kind: type, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output.stream)
    monkeypatch.setattr(sys, "stderr", stderr)
    view = opened_view(tmp_path)
    assert isinstance(view, kind)
    output.end()
    for step in (1, 2):
        view.step({"step": step, "time_s": 1.0, "loss": 0.5})
        view.warning("careful")
    view.close()
    print("audit: ok", flush=True)  # what follows the run does not fail either
    assert stderr.getvalue() == (
        f"flowrl: the output of the run cannot be written ({why}); the run goes on without it, and its records go to "
        f"{tmp_path}\n"
    )


@pytest.mark.parametrize("output", [closed_pipe], indirect=True)
def test_samples_end_quietly_when_their_reader_has_left(
    output: Output, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_rollouts(tmp_path, [row(1)], 1)
    monkeypatch.setattr(sys, "stdout", output.stream)
    output.end()
    assert main(["samples", str(tmp_path)]) == 141
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("redirected", "status", "told"),
    [
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        ("> /dev/full", 2, "flowrl: its output cannot be written: No space left on device\n"),
    ],
)
def test_output_that_cannot_be_written_is_no_traceback(redirected: str, status: int, told: str) -> None:
    command = ["bash", "-c", f"{sys.executable} -m flowrl.cli graphs {redirected}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", told)


def test_a_closed_stream_keeps_its_number() -> None:
    """A file that got it would be written by every process that is started later."""
    code = (
        "import os, sys; from flowrl.runtime.telemetry.standard_streams import open_closed; open_closed(); "
        "sys.exit(os.open('/', os.O_RDONLY))"
    )
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "{code}" <&- >&-'], cwd=ROOT, check=False)
    assert done.returncode > 2


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["audit", "a" * 300], "flowrl: " + "a" * 300 + ": File name too long\n"),
        (["samples", "a" * 300], "flowrl: " + "a" * 300 + ": File name too long\n"),
    ],
)
def test_an_error_of_the_system_is_one_message(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert capsys.readouterr().err == told


def test_a_run_of_another_user_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert main(["audit", "runs/theirs"]) == 2
    assert capsys.readouterr().err == (
        "flowrl: runs/theirs: Permission denied; ask its owner to let you use it, or run the command as its owner "
        "(a run is its owner's alone)\n"
    )

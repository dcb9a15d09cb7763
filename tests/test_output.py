"""Standard output without a reader: a run goes on without its view, a command that prints for a reader ends quietly."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from flowrl.cli import main
from flowrl.graph.analysis.plan import make_plan
from flowrl.runtime.driver.launch import Launch
from flowrl.runtime.driver.options import RunOptions
from flowrl.runtime.samples.rollout_files import write_rollouts
from flowrl.runtime.telemetry.view import LiveView, PlainView, View
from tests.graph_nodes import MACHINE, grpo
from tests.test_samples import row


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

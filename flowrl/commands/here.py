"""`flowrl.run`: a run in this Python process, from a script, a running event loop, or a notebook.

The run has a thread of its own, so it neither needs nor disturbs a loop of its caller. It is `flowrl run --here`: the
same options, checks, records and limits.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any

from flowrl.commands.prepare import prepare_graph
from flowrl.errors import FlowrlError
from flowrl.graph.load import forget_file
from flowrl.runtime.driver.job import RunOptions
from flowrl.runtime.driver.launch import Launch, Result


class HereRun:
    """A run that has begun. `await run` or `run.wait()` returns its result, or raises what ended it."""

    def __init__(self, launch: Launch) -> None:
        self.metrics: list[Mapping[str, Any]] = []
        """The lines of metrics.jsonl so far, one a batch."""
        self._launch = launch
        self._result: Future[Result] = Future()
        launch.here, launch.advise = True, self._note_line
        self._thread = threading.Thread(target=self._run, name=f"flowrl-{launch.graph.name}", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> Result:
        """The result, at the run's end. Raises TimeoutError after `timeout_s` seconds; the run goes on."""
        try:
            return self._result.result(timeout_s)
        except KeyboardInterrupt:
            self.stop()
            return self._result.result()

    def __await__(self) -> Generator[Any, None, Result]:
        return asyncio.wrap_future(self._result).__await__()

    @property
    def done(self) -> bool:
        """Whether the run has ended."""
        return self._result.done()

    def stop(self) -> None:
        """End the run in order, as an interrupt does: what is in flight is finished."""
        driver = self._launch.driver
        if driver is None:
            raise FlowrlError("the run has not begun its first batch; wait until it has, or end this process")
        driver.loop.call_soon_threadsafe(driver.interrupt)

    def __repr__(self) -> str:
        last = f", {len(self.metrics)} batches" if self.metrics else ""
        return f"<flowrl run of {self._launch.graph.name}: {'ended' if self.done else 'running'}{last}>"

    def _note_line(self, record: Mapping[str, Any]) -> str:
        self.metrics.append(dict(record))
        return ""

    def _run(self) -> None:
        try:
            self._result.set_result(self._launch.run())
        except BaseException as error:  # a thread's boundary: the caller gets whatever ended the run
            self._result.set_exception(error)


def run(graph: str | Path, config: Mapping[str, Any] | None = None, **options: Any) -> HereRun:
    """Begin a run of `graph`, a file or a name, in this process; see `HereRun` for what it returns.

        run = flowrl.run("my_graph.py", {"group_size": 4}, steps=20)
        result = await run  # or run.wait(); meanwhile, run.metrics grows

    `config` has options of the graph, and `options` those of `flowrl run`, by the names of a run file. A file is read
    again at each call. Raises ConfigError or GraphError for what is found before the run begins.
    """
    names = {field.name for field in fields(RunOptions)}
    if strange := sorted(options.keys() - names):
        raise TypeError(f"run() has no option {strange[0]!r}; options of the graph belong into config")
    forget_file(graph)
    prepared = prepare_graph("run", (RunOptions,), [str(graph), *_as_arguments({**(config or {}), **options})])
    sys.stdout.flush()
    return HereRun(Launch(prepared.file.path, prepared.graph, prepared.cfg, prepared.own[0]))


def _as_arguments(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The options as on a command line."""
    for name, value in options.items():
        option = f"--{prefix}{name}".replace("_", "-")
        if isinstance(value, Mapping):
            yield from _as_arguments(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            yield option if value else f"--{prefix}no-{name}".replace("_", "-")
        elif isinstance(value, tuple | list):
            yield from (option, *map(str, value))
        else:
            yield from (option, str(value))

"""Reads a task's rows in a process of its own.

The libraries that read Parquet and saved datasets start threads, and a process with threads cannot fork the processes
of episodes.
"""

from __future__ import annotations

import multiprocessing
import pickle
from multiprocessing.connection import Connection

from flowrl.errors import ConfigError
from flowrl.hub import pins
from flowrl.tasks import Rows, Task, load_rows, place_of_rows
from flowrl.tasks.reward_calls import child


def load_rows_apart(task: Task, *, whole: bool = False) -> Rows:
    """Like `load_rows`. Generated tasks stay in this process, where their verifiers find what was generated."""
    if place_of_rows(task) is None:
        return load_rows(task, whole=whole)
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_read, args=(task, whole, theirs))
    process.start()
    theirs.close()
    try:
        found, commits = pickle.loads(mine.recv_bytes())
    except EOFError:
        raise ConfigError(f"reading task {task.name!r} ended its process; see what it printed") from None
    finally:
        mine.close()
        process.join()
    if isinstance(found, str):
        raise ConfigError(found)
    assert isinstance(found, Rows)
    pins.use(commits)
    return found


def _read(task: Task, whole: bool, target: Connection) -> None:
    child.die_with_parent()
    try:
        found: Rows | str = load_rows(task, whole=whole)
    except ConfigError as problem:
        found = str(problem)
    target.send_bytes(pickle.dumps((found, pins.commits())))

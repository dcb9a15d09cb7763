"""Reads a task's rows in a process of its own.

The libraries that read Parquet and saved datasets start threads, and a process with threads cannot fork the processes
of episodes.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection, wait

from flowrl.errors import ConfigError
from flowrl.hub import pinned_commits, take_commits
from flowrl.machine.orphans import die_with_parent, has_ended
from flowrl.tasks import Rows, Task, load_rows, place_of_rows


def load_rows_apart(task: Task, *, whole: bool = False) -> Rows:
    """Like `load_rows`. Generated tasks stay in this process, where their verifiers find what was generated."""
    if place_of_rows(task) is None:
        return load_rows(task, whole=whole)
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_read, args=(task, whole, theirs))
    process.start()
    theirs.close()
    assert process.pid is not None
    handle = os.pidfd_open(process.pid)
    try:
        wait([mine, handle])  # its end shows in the pipe only if nothing else holds that
        if not mine.poll() and has_ended(handle):
            raise EOFError
        found, commits = pickle.loads(mine.recv_bytes())
    except EOFError:
        raise ConfigError(f"reading task {task.name!r} ended its process; see what it printed") from None
    finally:
        mine.close()
        os.close(handle)
        process.join()
    if isinstance(found, str):
        raise ConfigError(found)
    assert isinstance(found, Rows)
    take_commits(commits)
    return found


def _read(task: Task, whole: bool, target: Connection) -> None:
    die_with_parent()
    try:
        found: Rows | str = load_rows(task, whole=whole)
    except ConfigError as problem:
        found = str(problem)
    target.send_bytes(pickle.dumps((found, pinned_commits())))

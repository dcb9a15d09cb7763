"""Presence: a run's files stay as long as one of its processes lives, and go when none does."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from flowrl.errors import ConfigError
from flowrl.wire import run_files
from flowrl.wire.run_files import (
    HEIR,
    Presence,
    leave_heir,
    mark_path,
    places,
    remove_run,
    run_name,
    run_prefix,
    socket_root,
    sweep,
)
from flowrl.wire.slab import SHM

NO_PID = 1 << 30
"""Of no process here; one in another container may well have a number that nobody has in this one."""


@pytest.fixture
def run_id() -> Iterator[str]:
    run_id = uuid.uuid4().hex
    yield run_id
    remove_run(run_id)


def files(run_id: str, pid: int = NO_PID) -> list[Path]:
    """A segment, and a directory with a socket in it."""
    prefix = run_prefix(run_id, pid)
    segment, folder = SHM / f"flowrl-{prefix}-0", socket_root() / prefix
    segment.write_bytes(b"x")
    folder.mkdir()
    (folder / "socket").write_bytes(b"")
    return [segment, folder]


def test_a_file_in_the_place_of_the_socket_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"flowrl-{os.getuid()}").write_text("")
    with pytest.raises(ConfigError, match=r"is not a directory of this user; remove it, or set TMPDIR"):
        socket_root()


def there(paths: list[Path]) -> list[bool]:
    return [path.exists() for path in paths]


def test_the_files_of_a_living_run_stay_whatever_pid_and_time_they_tell(run_id: str) -> None:
    held = Presence(run_id)
    left = files(run_id)
    for path in left:
        os.utime(path, (0, 0))  # older than any process: the clock was set forward, or the container's uptime is short
    assert not set(map(str, left)) & set(sweep())
    assert there(left) == [True, True]
    held.close()


def test_the_files_of_a_run_without_a_process_go(run_id: str) -> None:
    left = files(run_id, os.getpid())  # the number has passed on to a process of another run
    assert set(map(str, left)) <= set(sweep())
    assert there(left) == [False, False]


def test_another_pid_namespace_sees_the_same_runs(run_id: str) -> None:
    """Two containers that share /dev/shm, but not their processes."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no pid namespaces to its users")
    held = Presence(run_id)
    left = files(run_id, os.getpid())
    program = "from flowrl.wire.run_files import sweep; print(*sweep(), sep='\\n')"
    done = subprocess.run([*apart, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(map(str, left)) & set(done.stdout.split("\n"))
    assert there(left) == [True, True]
    held.close()


def test_the_last_one_out_takes_all_along(run_id: str) -> None:
    first, last = Presence(run_id), Presence(run_id)
    left = files(run_id)
    marks = [mark_path(place, run_name(run_id)) for place in (SHM, socket_root())]
    first.close()
    assert there(left + marks) == [True] * 4
    last.close()
    assert there(left + marks) == [False] * 4


@pytest.mark.parametrize("when", ["listed", "removed"])
def test_what_another_process_removes_meanwhile_is_no_error(
    run_id: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = files(run_id)

    def gone_first(act: Callable[[Path], bool]) -> Callable[[Path], bool]:
        def body(path: Path) -> bool:
            if path == left[0]:
                path.unlink(missing_ok=True)
            return act(path)

        return body

    step = "_is_ours" if when == "listed" else "_remove_path"
    monkeypatch.setattr(run_files, step, gone_first(getattr(run_files, step)))
    sweep()
    assert there(left) == [False, False]


def test_links_are_left_alone_wherever_they_lead(run_id: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"x")
    dangling = SHM / f"flowrl-{run_prefix(run_id, NO_PID)}-0"
    to_a_file = SHM / f"flowrl-{run_prefix(run_id, NO_PID)}-1"
    dangling.symlink_to(tmp_path / "nothing")
    to_a_file.symlink_to(tmp_path / "kept")
    try:
        assert not {str(dangling), str(to_a_file)} & set(sweep())
        assert dangling.is_symlink() and to_a_file.exists()
    finally:
        dangling.unlink()
        to_a_file.unlink()


def test_a_process_that_comes_while_its_mark_is_swept_makes_a_new_one(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = mark_path(SHM, run_name(run_id))
    swept.mkdir()
    sweeper = os.open(swept, os.O_RDONLY)
    fcntl.flock(sweeper, fcntl.LOCK_EX)
    about_to_wait = threading.Event()
    flock = fcntl.flock

    def announced(held: int, operation: int) -> None:
        about_to_wait.set()
        flock(held, operation)

    monkeypatch.setattr(fcntl, "flock", announced)
    came: list[Presence] = []
    coming = threading.Thread(target=lambda: came.append(Presence(run_id)))
    coming.start()
    about_to_wait.wait()
    swept.rmdir()
    os.close(sweeper)
    coming.join()
    left = files(run_id)
    sweep()
    assert there(left) == [True, True]
    came[0].close()


def test_the_directory_of_sockets_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    loose = tmp_path / f"flowrl-{os.getuid()}"
    loose.mkdir()
    loose.chmod(0o755)
    assert socket_root() == loose
    assert loose.stat().st_mode & 0o777 == 0o700


OF_A_RUN = """
import os, sys, time
from flowrl.wire.run_files import Presence, leave_heir
held = Presence(sys.argv[1])
leave_heir(sys.argv[1])
print(flush=True)
sys.stdin.read()
held.close()
"""


@contextmanager
def processes_of(run_id: str, number: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that make files for a run, and leave an heir; each ends in order when its input is closed."""
    command = [sys.executable, "-c", OF_A_RUN, run_id]
    found = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(number)]
    try:
        for process in found:
            assert process.stdout is not None and process.stdout.readline() == "\n"
        yield found
    finally:
        for process in found:
            process.kill()
            process.communicate()


def heirs(run: str) -> list[int]:
    """Descriptors of the heirs of the run with this name; each can be read when its process has ended."""
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().decode().split("\0") if path.name.isdigit() else []
            if run in words and run_files.__file__ in words:
                found.append(os.pidfd_open(int(path.name)))
    return found


def await_end(process: int) -> None:
    assert select.select([process], [], [], 20)[0], "the heir is still there"
    os.close(process)


def test_an_heir_removes_what_killed_processes_leave_when_the_last_of_them_has_ended(run_id: str) -> None:
    with processes_of(run_id, 3) as (first, second, last):
        left = files(run_id)
        (heir,) = heirs(run_name(run_id))
        first.kill()
        second.kill()
        second.wait()
        assert not select.select([heir], [], [], 0.2)[0] and there(left) == [True, True]
        last.kill()
        await_end(heir)
        assert there([*left, *(mark_path(place, run_name(run_id)) for place in places())]) == [False] * 4


def test_an_heir_has_nothing_to_do_after_a_run_that_ends_in_order(run_id: str) -> None:
    with processes_of(run_id, 2) as running:
        left = files(run_id)
        (heir,) = heirs(run_name(run_id))
        for process in running:
            process.communicate()
        await_end(heir)
        assert there(left) == [False, False]


def test_a_run_that_has_lost_its_heir_gets_another_from_its_next_process(run_id: str) -> None:
    held = Presence(run_id)
    leave_heir(run_id)
    (heir,) = heirs(run_name(run_id))
    signal.pidfd_send_signal(heir, signal.SIGKILL)
    await_end(heir)
    leave_heir(run_id)
    leave_heir(run_id)
    (heir,) = heirs(run_name(run_id))
    assert (mark_path(SHM, run_name(run_id)) / HEIR).exists()
    held.close()
    await_end(heir)

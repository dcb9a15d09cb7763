"""The guard ends what a run's own Ray leaves when the driver is killed, and nothing else."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest

import flowrl.runtime.driver.ray_guard as guard_module
from flowrl.runtime.driver.ray_guard import VARIABLE, Guard, of_run

ROOT = Path(__file__).parents[3]
SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]
ENDS_WITHIN_S = 20
DRIVER = """
    import signal, subprocess
    from flowrl.runtime.driver.ray_guard import Guard
    before = subprocess.Popen({sleeper!r})
    guard = Guard("a mark")
    after = subprocess.Popen({sleeper!r}, start_new_session=True)
    print(before.pid, after.pid, flush=True)
    signal.pause()
"""


def await_environment(pid: int) -> None:
    """Wait until a new process has its environment: exec closes the pipe by which Popen knows of it a moment before."""
    ends_s = time.monotonic() + ENDS_WITHIN_S
    while not Path(f"/proc/{pid}/environ").read_bytes():
        assert time.monotonic() < ends_s, "the process has no environment"
        time.sleep(0.01)  # between looks at what the kernel shows


def test_what_was_started_under_the_guard_ends_with_a_killed_driver() -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER).format(sleeper=SLEEPER)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert driver.stdout is not None
    before, after = map(int, driver.stdout.readline().split())
    try:
        handle = os.pidfd_open(after)
        await_environment(after)
        assert after in of_run("a mark") and before not in of_run("a mark")
        driver.kill()
        assert select.select([handle], [], [], ENDS_WITHIN_S)[0], "the process is still there"
        os.close(handle)
        assert Path(f"/proc/{before}").exists()
    finally:
        driver.kill()
        os.kill(before, signal.SIGKILL)
        driver.communicate()


def test_a_dismissed_guard_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    guard = Guard("another mark")
    child = subprocess.Popen(SLEEPER)
    guard.dismiss()
    assert VARIABLE not in os.environ
    await_environment(child.pid)
    assert of_run("another mark") == {child.pid} and child.poll() is None
    child.kill()
    child.wait()


def test_a_process_that_hides_its_environment_is_found_by_its_parent() -> None:
    """As Ray's agents do: their titles overwrite it."""
    hides = (
        f"import subprocess as s; child = s.Popen({SLEEPER!r}, env={{}}); print(child.pid, flush=True); child.wait()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", hides], stdout=subprocess.PIPE, text=True, env={**os.environ, VARIABLE: "a third mark"}
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert of_run("a third mark") == {parent.pid, child}
    finally:
        os.kill(child, signal.SIGKILL)
        parent.communicate()


def test_a_guard_whose_looks_are_slow_still_ends_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine one look can take longer than the time after which the guard takes a run for ended."""
    monkeypatch.setattr(guard_module, "LOOK_EVERY_S", 1.2 * guard_module.QUIET_S)
    driver = subprocess.Popen(["true"])
    left = subprocess.Popen(SLEEPER, env={**os.environ, VARIABLE: "a fourth mark"})
    try:
        guard_module.end_after_driver(driver.pid, "a fourth mark", hidden={})
        assert left.poll() == -signal.SIGKILL
    finally:
        left.kill()
        left.wait()
        driver.wait()


def watched(guard: int, pid: int) -> bool:
    """Whether a guard has found a process, and so holds a descriptor of it."""
    for descriptor in Path(f"/proc/{guard}/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # closed by now
            if re.search(rf"^Pid:\s+{pid}$", descriptor.read_text(), re.M):
                return True
    return False


@pytest.mark.parametrize("starting", [True, False])
def test_a_process_that_hides_its_environment_ends_although_its_parent_ended_first(starting: bool) -> None:
    """The title of Ray's agents overwrites their environment, and the raylet ends in the moment of the driver's end."""
    hides = (
        f"import subprocess as s; child = s.Popen({SLEEPER!r}, env={{}}); print(child.pid, flush=True); child.wait()"
    )
    script = f"""
        import ctypes, signal, subprocess, sys, time
        from flowrl.runtime.driver.ray_guard import Guard
        guard = Guard("a fifth mark, {starting}")
        if not {starting}:
            with guard.let_speak():
                pass
        print(guard._process.pid, flush=True)
        with_the_driver = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        subprocess.Popen([sys.executable, "-c", {hides!r}], preexec_fn=with_the_driver)
        signal.pause()
    """
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert driver.stdout is not None
    guard, child = int(driver.stdout.readline()), int(driver.stdout.readline())
    handle = os.pidfd_open(child)
    while not watched(guard, child):
        time.sleep(0.05)  # between looks at what the guard has open
    driver.kill()
    try:
        assert select.select([handle], [], [], ENDS_WITHIN_S)[0], "the process is still there"
    finally:
        os.close(handle)
        driver.communicate()


MUTE = """
    import ctypes, os, subprocess, sys, time
    from flowrl.runtime.driver.ray_guard import Guard
    guard = Guard("a sixth mark")
    with guard.let_speak():
        raylet = subprocess.Popen([{raylet!r}, "100"])
        print(guard._process.pid, raylet.pid, flush=True)
        if {mute}:
            ctypes.PyDLL(None).sleep(60)  # with Python's lock
        raylet.wait()
    print("flowrl: the raylet has ended", file=sys.stderr, flush=True)
    sys.exit(2)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mute", [True, False])
def test_the_guard_speaks_for_a_driver_that_cannot_while_ray_starts(mute: bool, tmp_path: Path) -> None:
    raylet = tmp_path / "raylet"
    raylet.symlink_to(shutil.which("sleep") or "")
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(MUTE).format(raylet=str(raylet), mute=mute)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert driver.stdout is not None
    guard, pid = map(int, driver.stdout.readline().split())
    while not watched(guard, pid):
        time.sleep(0.05)  # between looks at what the guard has open
    os.kill(pid, signal.SIGKILL)
    _, said = driver.communicate(timeout=30)
    if mute:
        assert driver.returncode == -signal.SIGKILL and said == guard_module.MUTE.format("raylet") + "\n"
    else:
        assert driver.returncode == 2 and said == "flowrl: the raylet has ended\n"


@pytest.mark.timeout(60)
def test_the_guard_holds_no_copy_of_the_drivers_errors_once_ray_has_started() -> None:
    """A pipe that reads them ends with the driver, and not seconds later with its guard."""
    script = """
        import signal
        from flowrl.runtime.driver.ray_guard import Guard
        guard = Guard("a seventh mark")
        with guard.let_speak():
            pass
        print(guard._process.pid, flush=True)
        signal.pause()
    """
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert driver.stdout is not None
    errors = Path(f"/proc/{int(driver.stdout.readline())}/fd/2")
    while str(errors.readlink()) != "/dev/null":
        time.sleep(0.05)  # between looks at what the guard has open
    driver.kill()
    driver.communicate()

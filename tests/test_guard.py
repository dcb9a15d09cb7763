"""The guard ends what a run's own Ray leaves when the driver is killed, and nothing else."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flowrl.runtime.driver.guard import VARIABLE, Guard, of_run

ROOT = Path(__file__).parent.parent
SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]
ENDS_WITHIN_S = 20
DRIVER = """
    import signal, subprocess
    from flowrl.runtime.driver.guard import Guard
    before = subprocess.Popen({sleeper!r})
    guard = Guard("a mark")
    after = subprocess.Popen({sleeper!r}, start_new_session=True)
    print(before.pid, after.pid, flush=True)
    signal.pause()
"""


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

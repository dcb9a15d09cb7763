"""Forked interpreters are started, killed and found again as those that are started anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import warm
from tests.warm import server

pytestmark = pytest.mark.timeout(60)
SAYS = """
import json, os, random, signal, sys
print(json.dumps({
    "arguments": sys.argv, "path": sys.path[0], "name": __name__, "directory": os.getcwd(),
    "value": os.environ["RAY_X"], "warm": "warmed" in sys.modules, "random": random.random(),
    "open": sorted(map(int, os.listdir("/proc/self/fd")))[:3], "group": os.getpgid(0) == os.getpid(),
    "threads": vars(sys.modules.get("torch", json)).get("threads"),
    "graphs": [path for path in sys.path if "working_dir_files" in path],
    "child": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
}))
print("an error", file=sys.stderr)
if sys.argv[-1] == "sleep":
    print("ready", flush=True)
    signal.pause()
raise SystemExit(int(sys.argv[-1]))
"""


TORCH = (
    "import sys, types; sys.modules['torch'] = torch = types.ModuleType('torch'); "
    "torch.set_num_threads = lambda number: setattr(torch, 'threads', number)"
)
"""A torch that keeps what it is told."""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A warm Python of its own, whose servers import a module that counts its imports; they end with the test."""
    (tmp_path / "warmed.py").write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('once '); {TORCH}")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()  # without it the tests of the checkout would come first
    (tmp_path / "tests" / "says.py").write_text(SAYS)
    code = Path(server.__file__).read_text().replace('"trainer": TRAINER', '"trainer": ("warmed",)')
    (tmp_path / "server.py").write_text(code)
    owner = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(warm, "HERE", tmp_path)
    (tmp_path / "client.py").write_text((Path(warm.__file__).parent / "client.py").read_text())
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv(warm.COLD, raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    made = warm.python.__wrapped__()
    monkeypatch.setenv(warm.OWNER, str(owner.pid))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RAY_X", "of the server")
    yield made
    owner.kill()
    owner.wait()
    ends = time.monotonic() + 20
    while any((Path(made).parent.parent / "servers").glob("lock-*")):
        assert time.monotonic() < ends, "its servers end with the session, and remove what was made"
        time.sleep(0.05)  # between looks for what they leave


def say(python: str, last: str, directory: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "tests.says", last]
    return subprocess.run(
        command, cwd=directory, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_a_fork_is_what_an_interpreter_would_be(python: str, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    forked = [say(python, "3", elsewhere, RAY_X=value) for value in "ab"]
    assert (tmp_path / "imports").read_text() == "once "
    real = say(sys.executable, "3", elsewhere, RAY_X="a")
    expected = json.loads(real.stdout)
    for value, done in zip("ab", forked, strict=True):
        assert (done.returncode, done.stderr) == (real.returncode, real.stderr) == (3, "an error\n")
        found = json.loads(done.stdout)
        assert found.pop("warm") and found.pop("group")
        assert found.pop("value") == value
        assert 0 < found.pop("random") < 1
        assert found.pop("threads") == int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        assert found == {name: expected[name] for name in found}
    assert json.loads(forked[0].stdout)["random"] != json.loads(forked[1].stdout)["random"]


def test_variables_that_an_import_may_read_have_a_server_of_their_own(python: str, tmp_path: Path) -> None:
    for dynamo in ("1", "2", "1"):
        assert say(python, "0", tmp_path, TORCHDYNAMO_DISABLE=dynamo).returncode == 0
    assert (tmp_path / "imports").read_text() == "once once "


def test_processes_of_several_rays_and_numbers_of_threads_share_a_server(python: str, tmp_path: Path) -> None:
    for number in ("1", "2"):
        copied = f"/ray_{number}/working_dir_files/graph"
        done = say(python, "0", tmp_path, OMP_NUM_THREADS=number, PYTHONPATH=f"{copied}:{tmp_path}")
        found = json.loads(done.stdout)
        assert found["graphs"] == [copied] and found["threads"] == int(number)
    assert (tmp_path / "imports").read_text() == "once "


def test_a_server_is_no_descendant_of_who_asked_first(python: str, tmp_path: Path) -> None:
    """A run that ends all it has started leaves the server to the next one."""
    asks = f"import subprocess as s; s.run([{python!r}, '-m', 'tests.says', '0'], stdout=s.DEVNULL)"
    ends = "from flowrl.machine.processes import find_descendants; print(find_descendants())"
    command = [sys.executable, "-c", f"{asks}; {ends}"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout == "[]\n"
    assert say(python, "0", tmp_path).returncode == 0
    assert (tmp_path / "imports").read_text() == "once "


def test_a_killed_server_is_replaced(python: str, tmp_path: Path) -> None:
    for expected in ("once ", "once once "):
        for process in of_servers(python):
            os.kill(process, signal.SIGKILL)
        assert json.loads(say(python, "0", tmp_path).stdout)["warm"]
        assert (tmp_path / "imports").read_text() == expected


def of_servers(python: str) -> list[int]:
    """The processes of servers with sockets beside this Python."""
    directory = str(Path(python).parent.parent / "servers")
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if directory in file.read_text():
                found.append(int(file.parent.name))
    return found


def test_other_programs_become_the_interpreter(python: str) -> None:
    done = subprocess.run(
        [python, "-c", "import sys; print(sys.executable, 'warmed' in sys.modules)"], capture_output=True
    )
    assert done.stdout.decode().split() == [python, "False"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_fork_and_its_end_is_told(python: str, tmp_path: Path, number: signal.Signals) -> None:
    command = [python, "-m", "tests.says", "sleep"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == "", "the fork has ended too, as its output has"
        assert process.wait() == -number

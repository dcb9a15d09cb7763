"""The tool `python`: what its code may do, what it may not, and that nothing of it is left.

Real sandboxes of both kinds. Where the machine does not allow namespaces, those tests are skipped with its reason.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrl.environments import Action, EnvironmentName, Episodes, ToolCall, environment_rows
from flowrl.environments.tools import PythonTool, ToolResult, Tools, named_tools
from flowrl.environments.tools.sandbox import sandbox_process
from flowrl.environments.tools.sandbox.python_tool import LOST
from flowrl.environments.tools.sandbox.sandbox_process import (
    BoundedOutput,
    SandboxEnded,
    SandboxProcess,
    SandboxRefused,
    SandboxSettings,
)
from flowrl.errors import ConfigError
from flowrl.machine.orphans import PR_SET_CHILD_SUBREAPER, adopt_orphans
from flowrl.options import EpisodeData
from flowrl.recipes.agent_tools import AgentTools
from flowrl.tasks import Task
from flowrl.tasks.task_syntax import parse_options

pytestmark = pytest.mark.timeout(60)
KINDS = ("namespaces", "limits")
MIB = 1 << 20


@functools.cache
def refusal(kind: Any) -> str:
    """Why this machine does not allow such a sandbox, "" if it does."""
    try:
        PythonTool(sandbox=kind).check()
    except ConfigError as problem:
        return str(problem)
    return ""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if why := refusal(request.param):
        pytest.skip(why)
    return str(request.param)


def processes() -> dict[int, str]:
    """Those that this process has started, directly or not, and that belong to a sandbox, by pid."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        path = Path(f"/proc/{process.pid}")
        try:
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            ours = b"PYTHONHASHSEED=0\0MPLBACKEND=Agg" in (path / "environ").read_bytes()
        except OSError:
            continue
        if command and (ours or "sandbox_start.py" in command):
            found[process.pid] = command[:200]
    return found


@pytest.fixture(autouse=True, scope="module")
def _orphans_are_children() -> Iterator[None]:
    """So that `processes` finds them too, and no sandbox of another test run."""
    adopt_orphans()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No process and no folder."""
    tmp_path_factory.getbasetemp()  # pytest's own folder is not to be made in the one that is removed below
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # the code may run as another user
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        monkeypatch.undo()
        until = time.monotonic() + 5.0
        while (left := processes()) and time.monotonic() < until:
            time.sleep(0.01)  # a process that was killed leaves /proc a moment later
        assert not left
        assert not list(Path(folder).glob("flowrl-sandbox-*"))


@asynccontextmanager
async def python(kind: Any, seed: int = 0, **limits: Any) -> AsyncIterator[Any]:
    """What executes code and returns the result."""
    async with Tools([PythonTool(sandbox=kind, **limits)]).session(seed) as tools:

        async def run(code: str) -> ToolResult:
            return await tools.execute(ToolCall("python", {"code": code}))

        yield run


def ran(kind: Any, *codes: str, seed: int = 0, **limits: Any) -> list[ToolResult]:
    async def scenario() -> list[ToolResult]:
        async with python(kind, seed, **limits) as run:
            return [await run(code) for code in codes]

    return asyncio.run(scenario())


# What users expect


def test_a_call_shows_what_is_printed_and_the_value_of_its_end(kind: str) -> None:
    found = ran(kind, "print('a')\n1 + 1", "x = 3", "import sys\nprint('b', file=sys.stderr)\n'c'", "None", "")
    assert [result.text for result in found] == [
        "a\n2\n",
        "The code printed nothing.",
        "b\n'c'\n",
        *["The code printed nothing."] * 2,
    ]
    assert not any(result.failed for result in found)


def test_variables_functions_and_files_stay_until_the_end_of_the_episode(kind: str) -> None:
    codes = (
        "import math\nradius = 2\ndef area(r):\n    return math.pi * r * r",
        "open('kept.txt', 'w').write('in the file')",
        "round(area(radius), 3), open('kept.txt').read()",
        "import os; os.listdir('.')",
    )
    first = ran(kind, *codes)
    assert first[2].text == "(12.566, 'in the file')\n" and first[3].text == "['kept.txt']\n"
    other = ran(kind, "import os; os.listdir('.')", "radius")
    assert other[0].text == "[]\n" and other[1].text.endswith("NameError: name 'radius' is not defined\n")


def test_an_exception_is_a_traceback_of_the_codes_own_lines(kind: str) -> None:
    (found,) = ran(kind, "def half(x):\n    return x / 0\nhalf(3)")
    assert found.failed
    assert found.text.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "<call 1>", line 3, in <module>',
        "    half(3)",
    ]
    assert found.text.endswith("ZeroDivisionError: division by zero\n")
    syntax, exit_, quiet = ran(kind, "def (", "import sys; sys.exit('over')", "import sys; sys.exit(0)")
    assert syntax.failed and "SyntaxError" in syntax.text
    assert exit_.failed and exit_.text.endswith("SystemExit: over\n") and not quiet.failed


def test_the_same_seed_draws_the_same(kind: str) -> None:
    code = "import random; random.random(), list({'a', 'b', 'c', 'd'})"
    first, again, other = (ran(kind, code, seed=seed)[0].text for seed in (5, 5, 6))
    assert first == again != other


def test_installed_packages_are_there(kind: str) -> None:
    assert ran(kind, "import numpy; int(numpy.arange(5).sum())")[0].text == "10\n"


# What it must not


def test_a_loop_without_end_is_stopped_and_the_next_call_has_a_new_interpreter(kind: str) -> None:
    found = ran(kind, "x = 1", "while True: pass", "x", "1 + 1", call_s=1.5)
    assert found[1] == ToolResult(f"python was stopped: it took more than 1.5 s. {LOST}", failed=True)
    assert "NameError" in found[2].text and found[3].text == "2\n"


def test_a_pause_that_catches_everything_is_stopped(kind: str) -> None:
    code = (
        "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True:\n"
        "    try: signal.pause()\n    except BaseException: pass"
    )
    (found,) = ran(kind, code, call_s=1.0)
    assert found.text.startswith("python was stopped")


BOMBS = {
    "fork": "import os\nwhile True: os.fork()",
    "patient": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "shell": "import subprocess\nsubprocess.Popen(['sh', '-c', 'b() { b | b & }; b'])",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_processes_are_few_and_end(kind: str, bomb: str) -> None:
    """Threads of the interpreter stay: they end with it."""
    bombed, after = ran(kind, BOMBS[bomb], "1 + 1", call_s=3.0)
    assert bombed.failed or bomb == "shell"
    assert len(bombed.text) < 10_000 and after.text == "2\n"


def test_a_process_that_is_left_behind_ends_with_its_call() -> None:
    if why := refusal("namespaces"):
        pytest.skip(why)
    code = "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True).pid > 1"

    async def scenario() -> None:
        async with python("namespaces") as run:
            assert (await run(code)).text == "True\n"
            assert not [pid for pid, command in processes().items() if "sleep 1000" in command]

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["bytearray(10 << 30)", "[0] * (10 << 27)", "__import__('mmap').mmap(-1, 10 << 30)"])
def test_ten_gigabytes_are_refused_and_nothing_is_lost(kind: str, how: str) -> None:
    _, found, after = ran(kind, "x = 7", f"held = {how}", "x")
    assert found.failed and ("MemoryError" in found.text or "Cannot allocate memory" in found.text)
    assert after.text == "7\n"


def test_memory_that_grows_slowly_ends_at_the_limit(kind: str) -> None:
    grown, after = ran(
        kind, "held = []\nwhile True: held.append(bytearray(1 << 20))", "len(held)", memory_bytes=400 * MIB
    )
    assert grown.failed and "MemoryError" in grown.text
    assert 50 < int(after.text) < 400


def test_a_file_is_bounded(kind: str) -> None:
    code = "with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 20))"
    found, size = ran(kind, code, "import os; os.path.getsize('big')", disk_bytes=8 * MIB)
    assert found.failed and ("No space left" in found.text or "File too large" in found.text)
    assert int(size.text) <= 8 * MIB


def test_many_files_fill_the_folder_and_no_more() -> None:
    if why := refusal("namespaces"):
        pytest.skip(why)
    code = "number = 0\nwhile True:\n    open(str(number), 'wb').write(bytes(1 << 20))\n    number += 1"
    found, number = ran("namespaces", code, "number", disk_bytes=8 * MIB)
    assert "No space left" in found.text and int(number.text) <= 8


def test_a_gigabyte_of_output_is_its_begin_and_its_end(kind: str) -> None:
    code = "line = 'x' * (1 << 20)\nprint('begin')\nfor _ in range(1024): print(line)\nprint('end')"
    (found,) = ran(kind, code, call_s=40.0)
    assert not found.failed and len(found.text) < 9000
    assert found.text.startswith("begin\nxxx") and found.text.endswith("xxx\nend\n")
    assert f"[{1024 * (MIB + 1) + 10 - 8192} bytes left out]" in found.text


def test_there_is_no_network_in_namespaces() -> None:
    if why := refusal("namespaces"):
        pytest.skip(why)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        code = f"import socket\nsocket.create_connection({address!r}, 2)"
        (found,) = ran("namespaces", code)
    assert found.failed and "Network is unreachable" in found.text


def test_files_of_the_machine_are_not_seen_in_namespaces(tmp_path: Path) -> None:
    if why := refusal("namespaces"):
        pytest.skip(why)
    secret = tmp_path / "answers"
    secret.write_text("42")
    read, write, home = ran(
        "namespaces",
        f"open({str(secret)!r}).read()",
        "import os\nopen(os.path.join(os.path.dirname(os.__file__), 'new'), 'w')",
        "import os; os.listdir('/proc') if os.path.exists('/proc') else 'none'",
    )
    assert "FileNotFoundError" in read.text and "Read-only file system" in write.text and home.text == "'none'\n"


KILLS = {
    "parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nwhile True: signal.pause()",
    "itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\nimport ctypes; ctypes.string_at(0)",
    "exit": "import os\nos._exit(5)",
    "connection": "import os\nos.closerange(3, 65536)",
    "garbage": "import os\nfor fd in range(3, 4096):\n    try: os.write(fd, b'0' * 100)\n    except OSError: pass",
}


@pytest.mark.parametrize("how", KILLS)
def test_an_interpreter_that_ends_itself_is_a_text(kind: str, how: str) -> None:
    """The environment's process is never reached: the tests' process is in its place."""
    found = ran(kind, KILLS[how], "1 + 1", "1 + 1", call_s=2.0)
    if how != "garbage":  # what arrives too early answers the next calls, and harms nobody else
        assert found[0].failed and found[0].text.endswith(LOST)
        assert found[1].text == found[2].text == "2\n"
    assert all(isinstance(result.text, str) and len(result.text) < 1000 for result in found)


def test_every_process_of_the_user_survives_kill(kind: str) -> None:
    """`kill -1` reaches what the code's user may signal. As another user than root, in "limits", that is everything."""
    if kind == "limits" and os.geteuid() != 0:
        pytest.skip("without namespaces the code has the rights of the user")
    with subprocess.Popen(["sleep", "100"]) as other:
        ran(kind, "import os\nos.kill(-1, 9)", call_s=2.0)
        assert other.poll() is None
        other.kill()


def test_a_sandbox_that_cannot_be_started_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **kwargs: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", failing)
    with pytest.raises(SandboxRefused, match="no process could be started: Resource temporarily unavailable"):
        SandboxProcess(SandboxSettings("limits"), seed=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other_kind", KINDS)
def test_a_sandbox_survives_another_ones_kill(other_kind: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("without namespaces the code has the rights of the user")
    for kind in ("limits", other_kind):
        if why := refusal(kind):
            pytest.skip(why)

    async def both() -> tuple[str, str]:
        kinds: tuple[Any, ...] = (other_kind, "limits")
        other, killer = (SandboxProcess(SandboxSettings(kind), seed=0) for kind in kinds)
        try:
            await asyncio.gather(other.start_sandbox(), killer.start_sandbox())
            before = await other.run_code("x = 7")
            with suppress(SandboxEnded):
                await killer.run_code("import os\nos.kill(-1, 9)")
            return before.text, (await other.run_code("x")).text
        finally:
            await asyncio.gather(other.end_sandbox(), killer.end_sandbox())

    assert asyncio.run(both()) == ("", "7\n")


# The tool's own ways


def test_a_cancelled_call_leaves_nothing() -> None:
    kind = next((kind for kind in KINDS if not refusal(kind)), None)
    if kind is None:
        pytest.skip(refusal("limits"))

    async def scenario() -> None:
        async with python(kind, call_s=50.0) as run:
            await run("1")
            running = asyncio.create_task(run("import signal; signal.pause()"))
            await asyncio.sleep(0.2)  # the call is under way
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert not processes()

    asyncio.run(scenario())


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_owner_is_killed_the_interpreter_ends(kind: str, signal_: signal.Signals) -> None:
    script = (
        "import asyncio, sys\n"
        "from flowrl.environments import ToolCall\n"
        "from flowrl.environments.tools import PythonTool, Tools\n"
        "async def main():\n"
        f"    async with Tools([PythonTool(sandbox={kind!r})]).session() as tools:\n"
        "        print((await tools.execute(ToolCall('python', {'code': '1'}))).text, flush=True)\n"
        "        await tools.execute(ToolCall('python', {'code': 'while True: pass'}))\n"
        "asyncio.run(main())\n"
    )
    work = tempfile.mkdtemp()  # the folder of a killed owner stays, so it has to be ours
    os.chmod(work, 0o755)  # what root starts runs as another user
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": work}
    )
    assert owner.stdout is not None
    with owner:
        assert owner.stdout.readline() == "1\n"
        owner.send_signal(signal_)
        owner.wait()


def test_names_and_options() -> None:
    (found,) = named_tools("python:sandbox=limits,call_s=2.5")
    assert found == PythonTool(sandbox="limits", call_s=2.5)
    for name, says in (
        ("python:box=1", "the tool python has no option 'box'; it has sandbox, call_s, memory_bytes"),
        ("python:sandbox=none", "sandbox of the tool python is 'none'; it has to be namespaces or limits"),
        ("python:call_s=0", "call_s of the tool python is 0; it has to be a number above 0"),
        ("python:memory_bytes=1", "memory_bytes of the tool python is 1; it has to be a whole number of at least"),
        ("python:limits", "'limits' is no option; write them as SOURCE:key=value"),
        ("pyhton", "there is no tool 'pyhton'; did you mean python?"),
        ("calculator:digits=3", "the tool calculator has no options"),
    ):
        with pytest.raises(ConfigError) as error:
            named_tools(name)
        assert says in str(error.value)


def test_where_it_cannot_be_shut_in_it_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kernel that does not take these flags of `unshare`."""
    script = tmp_path / "sandbox_start.py"
    source = sandbox_process.START.read_text()
    script.write_text(source.replace("libc.unshare(everything)", "libc.unshare(-1)"))
    monkeypatch.setattr(sandbox_process, "START", script)
    with pytest.raises(ConfigError) as error:
        PythonTool().check()
    assert str(error.value).startswith(
        "the tool python cannot isolate its code on this machine (unshare: Invalid argument); allow"
    )
    assert "python:sandbox=limits" in str(error.value)


def test_an_episode_has_its_own_interpreter() -> None:
    kind = next((kind for kind in KINDS if not refusal(kind)), None)
    if kind is None:
        pytest.skip(refusal("limits"))
    name = f"tools/arithmetic:tools='calculator+python:sandbox={kind},call_s=20',calls=9"

    async def scenario() -> None:
        async with Episodes(name, step_s=30.0) as pool:
            assert pool.replays
            row = environment_rows(name).train[0]
            first, second = [await pool.reset(row) for _ in range(2)]
            names = [tool["function"]["name"] for tool in first.observation.tools]
            assert names == ["calculator", "python"]
            question = first.observation.text.rstrip("=")
            for episode, code in ((first, f"x = {question}"), (second, "x"), (first, "print(x)")):
                step = await episode.step(Action("", (ToolCall("python", {"code": code}),)))
                text = step.observations[0].messages[0]["content"]
            assert (await first.step(Action(text.strip()))).rewards == (1.0,)
            assert step.metrics == {"tool_calls": 2.0, "tool_errors": 0.0}
            for episode in (first, second):
                await episode.close()

    asyncio.run(scenario())


def test_output_is_bounded_in_memory() -> None:
    source, target = os.pipe()
    output = BoundedOutput(source, most_bytes=100)
    for text, shown in (
        (b"", ""),
        (b"short", "short"),
        (b"a" * 60 + b"b" * 60, f"{'a' * 50}\n[20 bytes left out]\n{'b' * 50}"),
        ("é".encode() * 50, "é" * 50),
    ):
        os.write(target, text)
        assert output.take_text() == shown
    os.close(target)
    output.close_output()


@pytest.mark.parametrize(
    "tools",
    ["calculator", "python:sandbox=limits", "python:call_s=5,disk_bytes=9000", "calculator+a.py:X", "3", "'a', b"],
)
def test_tools_of_the_command_line_come_through_the_name_of_an_environment(tools: str) -> None:
    graph = AgentTools(data=EpisodeData(Task("arithmetic:min_value=30,digits=[1,2]")), tools=tools)
    assert EnvironmentName(graph.environment).options == {"tools": tools, "min_value": 30, "digits": [1, 2]}


def test_a_mapping_may_have_commas() -> None:
    assert parse_options("it", """a={'x': 1, 'y': 'b,c'},d={1,2},e={{}},f=1""") == {
        "a": {"x": 1, "y": "b,c"},
        "d": {1, 2},
        "e": "{{}}",
        "f": 1,
    }


def test_a_value_in_quotes_may_have_commas() -> None:
    text = """a='x,y',b="it's, so",c=(1,2),d=[3,'),'],e=it's,f=\\"""
    assert parse_options("it", text) == {
        "a": "x,y",
        "b": "it's, so",
        "c": (1, 2),
        "d": [3, "),"],
        "e": "it's",
        "f": "\\",
    }

"""What code may do in a sandbox as a whole: memory of all its processes, system calls, sandboxes of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.environments.tools import PythonTool
from flowrl.environments.tools.code_answers import code
from flowrl.environments.tools.sandbox import sandbox_process
from flowrl.environments.tools.sandbox.sandbox_process import (
    Ran,
    SandboxCgroup,
    SandboxEnded,
    SandboxProcess,
    SandboxSettings,
)
from flowrl.environments.tools.sandbox.sandbox_start import DENIED, NESTING, NotAllowed, filter_program
from flowrl.errors import ConfigError
from tests.environments.test_environments_python_tool import KINDS, refusal

MIB = 1 << 20
LIMIT = 200 * MIB
pytestmark = pytest.mark.timeout(120)

FILL = """
import ctypes, mmap, os, signal, socket, threading, time
libc = ctypes.CDLL(None)
def fill(mib):
    held = bytearray(mib << 20)
    for place in range(0, len(held), 4096):
        held[place] = 1
    return held
def each(number, work):
    for one in range(number):
        if os.fork() == 0:
            try:
                work()
            finally:
                os._exit(0)
"""
"""Beginning of code that holds memory; what it adds sleeps until it is ended."""
HOLDS = {
    "forks": "each(8, lambda: (fill(60), signal.pause()))",
    "daemons": "each(8, lambda: (os.setsid(), os.fork() == 0 and (fill(60), signal.pause())))",
    "forks that end all the time": """
def chain():
    held = fill(80)
    while True:
        if os.fork():
            os._exit(0)
each(4, chain)""",
    "shared memory that no process has mapped": """
def shared():
    held = mmap.mmap(-1, 80 << 20)
    held.write(bytes(80 << 20))
    held.madvise(mmap.MADV_DONTNEED)
    signal.pause()
each(4, shared)""",
    "processes whose first thread has ended": """
def thread():
    threading.Thread(target=lambda: (fill(80), signal.pause())).start()
    libc.pthread_exit(None)
each(4, thread)""",
    "files without a name, and memory": """
for number in range(50):
    file = open("file", "wb")
    file.write(bytes(1 << 20))
    file.flush()
    os.unlink("file")
    globals()[f"kept{number}"] = file
held = fill(165)""",
    "sockets": """
def sockets():
    ends = []
    try:
        while True:
            ends += (pair := socket.socketpair())
            for end in pair:
                end.setblocking(False)
                try:
                    while True:
                        end.send(bytes(4096))
                except BlockingIOError:
                    pass
    except OSError:
        signal.pause()
each(25, sockets)""",
}


def ran(text: str, kind: str = "namespaces", **settings: Any) -> Ran:
    """The result of code; raises SandboxEnded."""
    if why := refusal(kind):
        pytest.skip(why)

    async def run() -> Ran:
        process = SandboxProcess(SandboxSettings(kind, **{"memory_bytes": LIMIT, **settings}), seed=0)  # type: ignore[arg-type]
        try:
            await process.start_sandbox()
            return await asyncio.wait_for(process.run_code(text), 60)
        finally:
            await process.end_sandbox()

    return asyncio.run(run())


@pytest.mark.parametrize("how", HOLDS)
def test_memory_of_all_processes_is_bounded(how: str) -> None:
    with pytest.raises(SandboxEnded) as error:
        ran(f"{FILL}{HOLDS[how]}\nsignal.pause()")
    assert error.value.out_of_memory
    assert "The interpreter was ended: its processes and files held " in str(error.value)
    assert str(error.value).endswith(" MiB of memory, and 200 MiB are allowed.")


ALLOWED = {
    "memory that forks leave to others as they end": """
held = fill(120)
for _ in range(30):
    each(6, lambda: None)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break""",
    "memory that a fork leaves to others": """
held = fill(120)
each(6, lambda: time.sleep(1))  # looks fall into it
time.sleep(1.5)  # and longer than they""",
    "processes that are started by vfork": (
        "import subprocess\nheld = fill(120)\nfor _ in range(40): subprocess.run(['/bin/true'])"
    ),
    "processes, threads and loops": """
import asyncio, multiprocessing, subprocess
async def cat():
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    return (await process.communicate(b"text"))[0]
assert asyncio.run(cat()) == b"text"
mine, theirs = multiprocessing.Pipe()
process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(9))
process.start()
assert mine.recv() == 9
process.join()
threading.Thread(target=print).start()
import numpy
assert numpy.ones((300, 300)).dot(numpy.ones((300, 300))).sum() == 300**3""",
}


@pytest.mark.parametrize("what", ALLOWED)
def test_what_is_below_the_limit_is_left_alone(what: str) -> None:
    found = ran(f"{FILL}{ALLOWED[what]}\nprint('done')")
    assert not found.failed and found.text.strip() == "done", found.text


def test_programs_of_answers_that_hold_too_much_are_counted() -> None:
    if why := refusal("namespaces"):
        pytest.skip(why)
    program = f"{FILL}each(8, lambda: (fill(150), signal.pause()))\nsignal.pause()"
    found = code(["", ""], [f"```python\n{program}\n```", "x = 1"], answer=[["assert True"], ["assert x == 1"]])
    assert found["rewards"] == [0.0, 1.0] and found["logs"]["out_of_memory"] == [1.0, 0.0]
    assert found["logs"]["timed_out"] == [0.0, 0.0]


TRIES = """
import ctypes, errno, fcntl, json, os, platform, socket
libc, found = ctypes.CDLL(None, use_errno=True), {{}}
libc.syscall.restype = ctypes.c_long
def tried(name, *arguments):
    result = libc.syscall(*map(ctypes.c_long, arguments))
    found[name] = "" if result >= 0 else errno.errorcode[ctypes.get_errno()]
def refused(name, work, *arguments):
    try:
        work(*arguments)
        found[name] = ""
    except OSError as problem:
        found[name] = errno.errorcode[problem.errno]
for name, number in {numbers}.items():
    tried(name, number, 0, 0, 0, 0, 0, 0)
for name, call in {calls}.items():
    tried(name, *call)
ends = socket.socketpair()
refused("larger pipe", fcntl.fcntl, os.pipe()[1], 1031, 1 << 20)
refused("larger buffer", ends[0].setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
refused("other option", ends[0].setsockopt, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
for family in (1, 2, 10, 16, 17, 38, 40):
    refused(f"family {{family}}", socket.socket, family, socket.SOCK_STREAM if family < 16 else socket.SOCK_RAW)
print(json.dumps(found))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_system_calls_that_a_sandbox_does_not_need_are_refused(kind: str) -> None:
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    numbers = {name: both[column] for name, both in {**DENIED, **NESTING}.items() if both[column] is not None}
    clone, clone3, prctl, mmap = ((56, 435, 157, 9), (220, 435, 167, 222))[column]
    calls = {
        "clone of namespaces": (clone, 0x10000000 | 17, 0, 0, 0, 0),
        "clone3": (clone3, 0, 0),
        "prctl PR_SET_DUMPABLE": (prctl, 4, 0, 0, 0, 0),
        "prctl PR_SET_PDEATHSIG": (prctl, 1, 0, 0, 0, 0),
        "prctl PR_GET_DUMPABLE": (prctl, 3, 0, 0, 0, 0),
        "mmap of huge pages": (mmap, 0, 2 * MIB, 3, 0x22 | 0x40000, -1, 0),
        "mmap": (mmap, 0, 2 * MIB, 3, 0x22, -1, 0),
        **({"getpid of x32": (0x40000000 | 39,)} if column == 0 else {}),
    }
    found = json.loads(ran(TRIES.format(numbers=numbers, calls=calls), kind).text)
    for name in ("prctl PR_GET_DUMPABLE", "mmap", "other option", *(f"family {family}" for family in (1, 2, 10, 16))):
        assert found.pop(name) == "", name
    assert [found.pop(f"family {family}") for family in (17, 38, 40)] == ["EAFNOSUPPORT"] * 3
    assert found.pop("clone3") == "ENOSYS"
    assert set(found.values()) == {"EPERM"}, found


def test_the_numbers_of_both_architectures_make_a_program() -> None:
    """The kernel refuses a program with a jump that leaves it; it has loaded that of this machine above."""
    for machine in ("x86_64", "aarch64"):
        for nested in (False, True):
            program = filter_program(machine, nested=nested)
            steps = [(program[at + 2], program[at + 3]) for at in range(0, len(program), 8)]
            assert all(place + 1 + max(jumps) < len(steps) for place, jumps in enumerate(steps[:-1]))
    with pytest.raises(NotAllowed, match="there is no filter of system calls for ppc64le, only for x86_64, aarch64"):
        filter_program("ppc64le", nested=False)


NESTS = """
import ctypes, os
libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
print(libc.unshare(0x10000000 | 0x20000))
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    open(f"/proc/self/{name}", "w").write(text)
os.mkdir("inner")
print(os.getuid(), libc.mount(b"tmpfs", b"inner", b"tmpfs", 0, b"size=1g"))
"""
FILLS_INNER = """
import signal, time
for number in range(99):
    open(f"inner/{number}", "wb", 0).write(bytes(8 << 20))
    time.sleep(0.01)  # not all before one look
signal.pause()
"""


def test_a_sandbox_inside_is_off_unless_asked_for() -> None:
    assert ran(NESTS).text.startswith("-1\n")
    assert ran(NESTS, nested=True) == Ran("0\n0 0\n", failed=False)
    with pytest.raises(SandboxEnded, match=r"held .* MiB of memory, and 200 MiB are allowed") as error:
        ran(NESTS + FILLS_INNER, nested=True)
    assert error.value.out_of_memory
    with pytest.raises(ConfigError, match="nested of the tool python has no effect with sandbox=limits"):
        PythonTool(sandbox="limits", nested=True)
    with pytest.raises(ConfigError, match="nested of the tool python is 1; it has to be True or False"):
        PythonTool(nested=1)  # type: ignore[arg-type]


# Cgroups, as far as a directory can show them that is not the kernel's


@pytest.fixture
def hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Groups `a` and `a/own`, of which `a` may have groups with limits; this process is in `a/own`."""
    (tmp_path / "fs" / "a" / "own").mkdir(parents=True)
    (tmp_path / "fs" / "a" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (tmp_path / "fs" / "a" / "own" / "cgroup.subtree_control").write_text("\n")
    (tmp_path / "fs" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (tmp_path / "self").write_text("9:name=systemd:/x\n0::/a/own\n")
    monkeypatch.setattr(sandbox_process, "ROOT", tmp_path / "fs")
    monkeypatch.setattr(sandbox_process, "OWN", tmp_path / "self")
    return tmp_path / "fs" / "a"


def the_group(hierarchy: Path) -> tuple[Path, dict[str, str]]:
    """The one group of a sandbox, and what its files hold."""
    (group,) = hierarchy.glob("flowrl-sandbox-*")
    return group, {file.name: file.read_text() for file in group.iterdir()}


def test_a_sandbox_is_in_a_cgroup_where_one_can_be_made(hierarchy: Path) -> None:
    """The kernel's part is missing: it neither counts, nor removes a group's files with its directory."""
    if why := refusal("namespaces"):
        pytest.skip(why)

    async def run() -> None:
        process = SandboxProcess(SandboxSettings(memory_bytes=LIMIT), seed=0)
        await process.start_sandbox()
        group, files = the_group(hierarchy)
        assert files == {
            "memory.max": str(LIMIT),
            "memory.swap.max": "0",
            "memory.oom.group": "1",
            "pids.max": "64",
            "cgroup.procs": "0",
        }
        assert (
            await process.run_code(f"{FILL}each(5, lambda: (fill(60), time.sleep(0.5)))\ntime.sleep(0.7)  # unseen")
        ).text == ""
        (group / "memory.events").write_text("low 0\noom 1\noom_kill 7\n")
        with pytest.raises(SandboxEnded, match="held more memory than the limit; 200 MiB are allowed") as error:
            await process.run_code("import os; os.kill(os.getpid(), 9); os._exit(1)")
        assert error.value.out_of_memory
        await process.end_sandbox()

    asyncio.run(run())


def test_groups_of_killed_owners_are_removed(hierarchy: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    (hierarchy / f"flowrl-sandbox-{gone.pid}-1").mkdir()
    (hierarchy / f"flowrl-sandbox-{os.getppid()}-1").mkdir()
    (hierarchy / "theirs").mkdir()
    made = SandboxCgroup.create_group(memory_bytes=LIMIT, num_processes=64)
    assert made is not None and not made.out_of_memory
    kept = {f"flowrl-sandbox-{os.getppid()}-1", "theirs", "own", made.directory.name, "cgroup.subtree_control"}
    assert {one.name for one in hierarchy.iterdir()} == kept
    made.remove_group()


def test_where_no_group_may_have_limits_there_is_none(hierarchy: Path) -> None:
    for file in (hierarchy / "cgroup.subtree_control", hierarchy.parent / "cgroup.subtree_control"):
        file.write_text("cpu memory\n")
    assert SandboxCgroup.create_group(memory_bytes=LIMIT, num_processes=64) is None
    (hierarchy.parent.parent / "self").unlink()
    assert SandboxCgroup.create_group(memory_bytes=LIMIT, num_processes=64) is None

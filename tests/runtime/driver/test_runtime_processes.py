"""Hearing of the ends of processes and of a cluster's head."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from flowrl.machine.processes import Processes, find_children
from flowrl.runtime.driver import run_processes
from flowrl.runtime.driver.run_processes import watch_address
from tests.wire.channel_rig import play

STUBBORN = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("/proc/self/comm").write_text("stubborn")
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_the_end_of_a_process_is_told_once(child: subprocess.Popen[str]) -> None:
    async def main() -> None:
        told: asyncio.Queue[str] = asyncio.Queue()
        run_processes = Processes()
        run_processes.follow_process("raylet", child.pid, told.put_nowait)
        child.kill()
        assert await told.get() == "raylet"
        run_processes.report_ended()
        assert told.empty()
        await run_processes.end_all(within_s=0)

    play(main())


def test_an_end_that_the_loop_has_not_seen_yet_is_told_on_looking(child: subprocess.Popen[str]) -> None:
    async def main() -> None:
        told: list[str] = []
        run_processes = Processes()
        run_processes.follow_process("raylet", child.pid, told.append)
        child.kill()
        child.wait()
        run_processes.report_ended()
        assert told == ["raylet"]

    play(main())


def test_what_does_not_end_by_itself_is_killed_and_nobody_is_told(child: subprocess.Popen[str]) -> None:
    async def main() -> None:
        told: list[str] = []
        run_processes = Processes()
        run_processes.follow_process("host", child.pid, told.append)
        run_processes.expect_ends()
        child.terminate()  # which it ignores
        await run_processes.end_all(within_s=0.01)
        assert told == []

    play(main())
    assert child.wait() == -signal.SIGKILL


def test_a_process_that_is_gone_or_elsewhere_is_not_followed(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()

    async def main() -> None:
        run_processes = Processes()
        run_processes.follow_process("host", child.pid, pytest.fail)
        await run_processes.end_all(within_s=60)

    play(main())


def test_children_are_found_by_name(child: subprocess.Popen[str]) -> None:
    assert find_children("stubborn", "raylet") == {"stubborn": child.pid}
    assert find_children("systemd", "init") == {}, "others' children are not ours"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_processes, "RETRY_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_a_head_that_closes_connections_and_listens_on_is_alive_until_it_is_gone() -> None:
    async def main() -> None:
        enough = asyncio.Event()
        connections = 0

        async def greet_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            writer.write(b"\0" * 100)
            await writer.drain()
            writer.close()
            if connections == 5:
                enough.set()

        server = await asyncio.start_server(greet_and_close, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        watching = asyncio.create_task(watch_address(("127.0.0.1", port), patience_s=0.2))
        await enough.wait()
        assert not watching.done()
        server.close()
        await server.wait_closed()
        await watching

    play(main())


@pytest.mark.usefixtures("at_once")
def test_a_connection_that_stays_is_waited_on_without_a_limit() -> None:
    async def main() -> None:
        connected = asyncio.Event()
        end = asyncio.Event()

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set()
            await end.wait()
            writer.close()

        server = await asyncio.start_server(hold, "127.0.0.1", 0)
        address = ("127.0.0.1", server.sockets[0].getsockname()[1])
        watching = asyncio.create_task(watch_address(address, patience_s=0.01))
        await connected.wait()
        done, _ = await asyncio.wait((watching,), timeout=0.1)  # ten times the patience
        assert not done
        server.close()
        end.set()
        await watching

    play(main())

"""Tools of MCP servers: a real server over both transports, sessions of their own, and what happens when it fails."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from flowrl.environments import Action, EnvironmentFailed, Episodes, OpenEpisode, ToolCall, environment_rows
from flowrl.environments.tools import McpServer, ToolResult, Tools, named_tools
from flowrl.environments.tools.mcp_server import UNKNOWN
from flowrl.errors import ConfigError
from tests.base.small_proxy import small_proxy

SERVER = Path(__file__).parent / "mcp_notes_server.py"
COMMAND = f"{sys.executable} {SERVER} stdio"
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was executed, a line for each call."""
    file = tmp_path / "log"
    file.touch()
    monkeypatch.setenv("FLOWRL_TEST_NOTES_LOG", str(file))
    return file


class Served:
    """The server's process, behind a port."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, str(SERVER), "http", str(self.port)])
        while self.process.poll() is None:
            with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.05)  # nothing tells when another program listens
        raise AssertionError("the server has ended")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def served(log: Path) -> Iterator[Served]:
    found = Served()
    yield found
    found.end()


@pytest.fixture(params=["stdio", "http"])
def address(request: pytest.FixtureRequest, log: Path) -> str:
    return COMMAND if request.param == "stdio" else request.getfixturevalue("served").url


def called(server: McpServer, *calls: tuple[str, dict[str, Any]]) -> list[ToolResult]:
    """The results of the calls of one session."""

    async def scenario() -> list[ToolResult]:
        async with Tools([server]).session() as tools:
            return [await tools.execute(ToolCall(name, arguments)) for name, arguments in calls]

    return asyncio.run(scenario())


def failure(server: McpServer, *calls: tuple[str, dict[str, Any]]) -> EnvironmentFailed:
    with pytest.raises(EnvironmentFailed) as error:
        called(server, *calls)
    return error.value


def left_over() -> list[int]:
    """Servers that this process has started and that are still there."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if f"{SERVER}\0stdio" in Path(f"/proc/{pid}/cmdline").read_text()]


# What a server offers


def test_a_servers_tools_are_those_of_the_episode_with_their_schemas(address: str) -> None:
    async def scenario() -> None:
        async with Tools([McpServer(address)]).session() as tools:
            first, *others = tools.descriptions
            assert first == {
                "type": "function",
                "function": {
                    "name": "note",
                    "description": "Keeps a note, and tells all that this session has.",
                    "parameters": {
                        "type": "object",
                        "title": "noteArguments",
                        "properties": {"text": {"title": "Text", "type": "string"}},
                        "required": ["text"],
                    },
                },
            }
            assert [tool["function"]["name"] for tool in others] == ["key", "fails", "ends"]

    asyncio.run(scenario())


def test_what_the_policy_gets_wrong_is_a_text(address: str, log: Path) -> None:
    results = called(
        McpServer(address, observation_bytes=300),
        ("note", {"text": "a"}),
        ("note", {"text": "b"}),
        ("note", {}),
        ("note", {"text": [1]}),
        ("fails", {"how": "so"}),
        ("nothing", {}),
        ("note", {"text": "x" * 1000}),
        ("note", {"text": float("nan")}),
    )
    # The server's package sends a list as a text for each.
    assert results[:2] == [ToolResult("a"), ToolResult("a\nb")]
    assert all(result.failed for result in results[2:6])
    assert "Field required" in results[2].text and "valid string" in results[3].text
    assert "Error executing tool fails" in results[4].text
    assert results[5].text.startswith("There is no tool 'nothing'; the tools are: note, key, fails, ends.")
    assert " bytes left out]" in results[6].text and len(results[6].text.encode()) <= 300
    assert results[7].failed
    assert log.read_text().split("\n") == ["note a", "note b", "fails", "note " + "x" * 1000, ""]


def test_headers_and_variables_reach_the_server(served: Served) -> None:
    key = ("key", {})
    assert called(McpServer(served.url, headers={"x-key": "of the header"}), key) == [ToolResult("of the header")]
    assert called(McpServer(COMMAND, variables={"NOTES_KEY": "of the variable"}), key) == [
        ToolResult("of the variable")
    ]


def test_a_session_ends_with_its_episode(address: str) -> None:
    for _ in range(2):
        assert called(McpServer(address), ("note", {"text": "only"})) == [ToolResult("only")]
        assert left_over() == []


# What a server does wrong


def test_a_server_that_dies_during_a_call_voids_the_attempt_and_the_call_is_not_repeated(
    address: str, log: Path
) -> None:
    found = failure(McpServer(address), ("note", {"text": "a"}), ("ends", {"how": "die"}), ("note", {"text": "b"}))
    assert found.cause == ("env_died" if address == COMMAND else "env_unreachable")
    assert "during ends" in str(found)
    assert log.read_text() == "note a\nends die\n"
    assert left_over() == []


def test_a_server_that_dies_between_calls_voids_the_attempt(served: Served, log: Path) -> None:
    async def scenario() -> None:
        async with Tools([McpServer(served.url)]).session() as tools:
            await tools.execute(ToolCall("note", {"text": "a"}))
            served.end()
            with pytest.raises(EnvironmentFailed) as error:
                await tools.execute(ToolCall("note", {"text": "b"}))
            assert error.value.cause == "env_unreachable"

    asyncio.run(scenario())
    assert log.read_text() == "note a\n"


def test_a_server_that_was_started_anew_does_not_know_the_session(served: Served, log: Path) -> None:
    """What it kept for the episode is lost, so going on would be another episode."""

    async def scenario() -> None:
        async with Tools([McpServer(served.url)]).session() as tools:
            await tools.execute(ToolCall("note", {"text": "a"}))
            served.end()
            served.start()
            with pytest.raises(EnvironmentFailed) as error:
                await tools.execute(ToolCall("note", {"text": "b"}))
            assert error.value.cause == "env_unreachable"

    asyncio.run(scenario())
    assert log.read_text() == "note a\n"


def test_a_call_that_takes_too_long_is_a_text_and_is_not_repeated(address: str, log: Path) -> None:
    results = called(McpServer(address, call_s=1.5), ("ends", {"how": "hang"}), ("note", {"text": "after"}))
    assert results[0] == ToolResult(f"ends was stopped: it took more than 1.5 s. {UNKNOWN}", failed=True)
    assert results[1] == ToolResult("after")
    assert log.read_text() == "ends hang\nnote after\n"
    assert left_over() == []


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/mcp"
    found = failure(McpServer(url))
    assert found.cause == "env_unreachable" and f"the MCP server {url!r} was lost at its start: ConnectError" in str(
        found
    )
    command = f"{sys.executable} -c 'raise SystemExit(3)'"
    found = failure(McpServer(command))
    assert found.cause == "env_died" and "ended at its start" in str(found)


ANSWERS: dict[str, tuple[Callable[[Any], web.Response], str]] = {
    "an error's status": (lambda id_: web.Response(status=500, text="broken"), "env_unreachable"),
    "no message": (lambda id_: web.Response(text="{]", content_type="application/json"), "env_malformed"),
    "another page": (lambda id_: web.Response(text="<html>", content_type="text/html"), "env_unreachable"),
    "half a result": (
        lambda id_: web.json_response({"jsonrpc": "2.0", "id": id_, "result": {"content": [{"type": "text"}]}}),
        "env_malformed",
    ),
    "a refusal": (
        lambda id_: web.json_response(
            {"jsonrpc": "2.0", "id": id_, "error": {"code": -32602, "message": "no such city"}}
        ),
        "",
    ),
    "an error of its own": (
        lambda id_: web.json_response(
            {"jsonrpc": "2.0", "id": id_, "error": {"code": -32603, "message": "it is dark"}}
        ),
        "",
    ),
}


@pytest.mark.parametrize("how", ANSWERS)
def test_answers_are_told_apart(how: str) -> None:
    """A server made by hand, of which the call of a tool gets this answer."""
    answer, cause = ANSWERS[how]
    posts = 0

    async def post(request: web.Request) -> web.Response:
        nonlocal posts
        message = await request.json()
        if (method := message["method"]) == "tools/call":
            posts += 1
            return answer(message["id"])
        if "id" not in message:
            return web.Response(status=202)
        info = {"serverInfo": {"name": "hand", "version": "1"}, "capabilities": {"tools": {}}}
        results: dict[str, Any] = {
            "initialize": {"protocolVersion": "2025-06-18", **info},
            "tools/list": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]},
        }
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": results[method]})

    async def scenario() -> ToolResult:
        app = web.Application()
        app.router.add_post("/mcp", post)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with Tools([McpServer(f"http://127.0.0.1:{runner.addresses[0][1]}/mcp")]).session() as tools:
                return await tools.execute(ToolCall("look", {}))
        finally:
            await runner.cleanup()

    if cause:
        with pytest.raises(EnvironmentFailed) as error:
            asyncio.run(scenario())
        assert error.value.cause == cause
    else:
        found = asyncio.run(scenario())
        assert found.failed and found.text in ("look: no such city", "look: it is dark")
    assert posts == 1


# Names


def test_names_of_servers() -> None:
    (found,) = named_tools("mcp:https://example.org/mcp?a=1")
    assert found == McpServer("https://example.org/mcp?a=1") and found.over_http
    tools = list(named_tools("calculator+mcp:python server.py '--sum=a+b' \"c d\""))
    assert isinstance(tools[1], McpServer) and tools[1].words == ["python", "server.py", "--sum=a+b", "c d"]
    for make, says in (
        (lambda: named_tools("mcp:"), "an MCP server has no address; write mcp:https://HOST/PATH, or mcp:COMMAND"),
        (lambda: named_tools("mcp:it's"), 'the command "it\'s" of an MCP server cannot be split into words'),
        (lambda: McpServer("a b", headers={"a": "b"}), "is a command, so it takes no headers; use variables"),
        (lambda: McpServer("http://a", variables={"a": "b"}), "is no command, so it takes no variables; use headers"),
        (lambda: McpServer("a", call_s=0), "call_s and observation_bytes of the MCP server 'a' are 0 and 65536"),
        (lambda: named_tools("mcp:no-such-program x").check_tools(), "there is no program 'no-such-program'"),
        (lambda: Tools([McpServer("a")]).descriptions, "what the MCP server 'a' offers is known in an episode"),
    ):
        with pytest.raises(ConfigError) as error:
            make()
        assert says in str(error.value)


# Episodes


def note(text: str) -> Action:
    return Action("", (ToolCall("note", {"text": text}),))


def content(step: Any) -> str:
    return str(step.observations[0].messages[0]["content"])


async def at_once(name: str, number: int, play: Callable[[OpenEpisode, int], Awaitable[None]]) -> None:
    """So many episodes side by side."""
    row = environment_rows(name).train[0]
    async with Episodes(name, step_s=100.0) as pool:
        assert not pool.replays

        async def one(index: int) -> None:
            episode = await pool.reset(row)
            await play(episode, index)
            await episode.close()

        await asyncio.gather(*map(one, range(number)))


@pytest.mark.parametrize(
    ("transport", "number"), [("stdio", 2), ("http", 32), pytest.param("stdio", 32, marks=pytest.mark.slow)]
)
def test_every_episode_has_a_session_of_its_own(transport: str, number: int, request: Any, log: Path) -> None:
    address = COMMAND if transport == "stdio" else request.getfixturevalue("served").url

    async def play(episode: OpenEpisode, index: int) -> None:
        assert content(await episode.step(note(f"first of {index}"))) == f"first of {index}"
        step = await episode.step(note(f"second of {index}"))
        assert content(step) == f"first of {index}\nsecond of {index}"
        assert step.metrics == {"tool_calls": 2.0, "tool_errors": 0.0}

    asyncio.run(at_once(f"tools/arithmetic:tools={f'mcp:{address}'!r}", number, play))
    lines = log.read_text().splitlines()
    assert sorted(lines) == sorted(
        f"note {which} of {index}" for index in range(number) for which in ("first", "second")
    )


def test_of_several_episodes_only_those_of_the_dead_server_fail(log: Path) -> None:
    async def play(episode: OpenEpisode, index: int) -> None:
        await episode.step(note(str(index)))
        if index == 0:
            with pytest.raises(EnvironmentFailed) as error:
                await episode.step(Action("", (ToolCall("ends", {"how": "die"}),)))
            assert error.value.cause == "env_died"
        else:
            assert content(await episode.step(note("more"))) == f"{index}\nmore"

    asyncio.run(at_once(f"tools/arithmetic:tools={f'mcp:{COMMAND}'!r}", 2, play))


def test_a_killed_episode_takes_its_server_along(log: Path) -> None:
    name = f"tools/arithmetic:tools={f'mcp:{COMMAND}'!r}"

    async def scenario() -> None:
        async with Episodes(name) as pool:
            episode = await pool.reset(environment_rows(name).train[0])
            servers = running_servers()
            (owner,) = {parent(path) for path in servers}
            os.kill(owner, signal.SIGKILL)
            with pytest.raises(EnvironmentFailed):
                await episode.step(note("a"))
            await episode.close_quietly()
            assert not set(servers) & set(running_servers())

    asyncio.run(scenario())


def running_servers() -> list[Path]:
    """Of all processes, those that are the server behind a command."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{SERVER}\0stdio" in (path / "cmdline").read_text():
                found.append(path)
    return found


def parent(path: Path) -> int:
    return int((path / "stat").read_text().rpartition(")")[2].split()[1])


def test_tools_of_a_server_on_this_machine_and_behind_a_proxy(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    def noted(url: str) -> str:
        async def scenario() -> str:
            async with Tools([McpServer(url)]).session() as tools:
                return (await tools.execute(ToolCall("note", {"text": "a"}))).text

        return asyncio.run(scenario())

    with small_proxy({"notes.example": served.port}) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        assert "a" in noted(served.url) and proxy.asked == []
        assert "a" in noted("http://notes.example/mcp") and set(proxy.asked) == {"HTTP notes.example"}

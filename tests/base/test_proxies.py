"""Proxies of the environment: outside addresses go through them, this machine and the run's machines never do."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import pytest

from flowrl.errors import ConfigError
from flowrl.machine.proxies import exceptions, proxy_of, reach_directly, shown_proxy
from flowrl.tasks.reward_calls.http import HttpReward, Patience
from flowrl.tasks.reward_calls.judge import BadReward
from tests.agents.endpoint_rig import an_endpoint
from tests.base.small_proxy import SmallProxy, small_proxy
from tests.nodes.episodes.test_nodes_agent_program import FILE, only_episode, play
from tests.tasks.test_rewards_http import Server, ask, outcomes
from tests.tasks.test_rewards_http import served as served_rewards

NAMES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "no_proxy")
DEAD = "127.0.0.1:9"
"""Nothing listens there."""
OUTSIDE = "server.example"
"""A host that only the proxy of a test knows."""


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also restores what a test adds to the environment."""
    for name in NAMES:
        for written in (name, name.upper()):
            monkeypatch.setenv(written, "")
            monkeypatch.delenv(written)


CASES: list[tuple[dict[str, str], str, str]] = [
    ({}, "http://a.example/", ""),
    ({"http_proxy": "http://p:1"}, "http://a.example/", "http://p:1"),
    ({"HTTP_PROXY": "http://p:1"}, "http://a.example/", "http://p:1"),
    ({"http_proxy": "http://small:1", "HTTP_PROXY": "http://big:1"}, "http://a.example/", "http://small:1"),
    ({"http_proxy": "p:1"}, "http://a.example/", "http://p:1"),
    ({"http_proxy": "http://p:1"}, "https://a.example/", ""),
    ({"https_proxy": "http://p:1"}, "wss://a.example/ws", "http://p:1"),
    ({"HTTP_PROXY": "http://p:1"}, "ws://a.example/ws", "http://p:1"),
    ({"ALL_PROXY": "http://p:1"}, "https://a.example/", "http://p:1"),
    ({"all_proxy": "http://p:1", "http_proxy": "http://q:1"}, "http://a.example/", "http://q:1"),
    ({"all_proxy": "socks5://u:x@p"}, "http://a.example/", "socks5h://u:x@p:1080"),
    ({"ALL_PROXY": "socks://p:7/"}, "http://a.example/", "socks5h://p:7"),
    ({"ALL_PROXY": "socks4://p:7"}, "http://a.example/", "socks4a://p:7"),
    ({"http_proxy": "http://p:1", "no_proxy": "b.example, .example"}, "http://a.example/", ""),
    ({"http_proxy": "http://p:1", "NO_PROXY": "a.example:81"}, "http://a.example/", "http://p:1"),
    ({"http_proxy": "http://p:1", "NO_PROXY": "a.example:81"}, "http://a.example:81/", ""),
    ({"http_proxy": "http://p:1", "NO_PROXY": "*.example"}, "http://a.example/", ""),
    ({"http_proxy": "http://p:1", "NO_PROXY": "*"}, "http://a.example/", ""),
    ({"http_proxy": "http://p:1", "NO_PROXY": "aa.example,le"}, "http://a.example/", "http://p:1"),
    ({"http_proxy": "http://p:1", "NO_PROXY": "203.0.113.0/24"}, "http://203.0.113.7:8100/", ""),
    ({"http_proxy": "http://p:1", "NO_PROXY": "203.0.113.0/24"}, "http://203.0.114.7:8100/", "http://p:1"),
    *(
        ({"all_proxy": "http://p:1"}, f"http://{host}:8100/score", "")
        for host in ("localhost", "127.0.0.1", "127.3.2.1", "[::1]", "0.0.0.0", "a.localhost", socket.gethostname())
    ),
]


@pytest.mark.parametrize(("variables", "url", "proxy"), CASES)
def test_the_proxy_of_an_address(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str, proxy: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_of(url) == proxy


@pytest.mark.parametrize("proxy", ["http://p:port", "tcp://p:1", "http://", "http://p:0"])
def test_a_proxy_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(ConfigError, match=r"that the environment has for a\.example is no address of a proxy"):
        proxy_of("http://a.example/")


def test_a_password_is_not_shown() -> None:
    assert shown_proxy("http://me:secret@p:3128/") == "http://p:3128"


def test_the_exceptions_are_extended_in_both_spellings() -> None:
    own = "localhost,127.0.0.1,::1"
    assert exceptions({}) == {"NO_PROXY": own, "no_proxy": own}
    both = exceptions({"NO_PROXY": "a, b", "no_proxy": "c"}, "10.0.0.2", "")
    assert both == {"NO_PROXY": f"a,b,{own},10.0.0.2", "no_proxy": f"c,{own},10.0.0.2"}
    assert exceptions({"no_proxy": "c"})["NO_PROXY"] == f"c,{own}"
    assert exceptions(both, "10.0.0.2") == both
    assert exceptions({"NO_PROXY": "*"}, "10.0.0.2") == {"NO_PROXY": "*", "no_proxy": "*"}


def test_what_is_written_into_the_environment_is_read_by_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import httpx2
    from requests.utils import should_bypass_proxies

    monkeypatch.setenv("http_proxy", f"http://{DEAD}")
    reach_directly("10.0.0.2", "node2")
    assert getproxies()["http"] == f"http://{DEAD}"
    for host in ("127.0.0.1", "localhost", "10.0.0.2", "node2", OUTSIDE):
        direct, url = host != OUTSIDE, f"http://{host}:8100/"
        assert bool(proxy_bypass(host)) == direct
        assert should_bypass_proxies(url, None) == direct
        for library in (httpx, httpx2):
            with library.Client() as client:
                assert isinstance(client._transport_for_url(library.URL(url)), library.HTTPTransport)
                assert (client._transport_for_url(library.URL(url)) is client._transport) == direct


def asked(*hosts: str, through: SmallProxy | None = None) -> list[float | str]:
    """What two questions get from one reward server, asked at `hosts`, of which the proxy knows OUTSIDE."""

    async def scenario() -> list[float | str]:
        async with served_rewards(server := Server()):
            port = urlsplit(server.url).port
            if through is not None:
                through.hosts = {OUTSIDE: port}
            urls = [f"http://{host}:{port}/score" for host in hosts]
            reward = HttpReward(urls, timeout_s=10.0, retries=0, batch=1, patience=Patience(away_s=0.0))
            try:
                return outcomes(await ask(reward, "a", "bb"))
            finally:
                await reward.close()

    return asyncio.run(scenario())


KINDS = [
    ("http_proxy", "http", "HTTP"),
    ("HTTP_PROXY", "http", "HTTP"),
    ("all_proxy", "http", "HTTP"),
    ("ALL_PROXY", "socks5", "SOCKS5"),
    ("all_proxy", "socks5h", "SOCKS5"),
    ("ALL_PROXY", "socks", "SOCKS5"),
    ("http_proxy", "socks4", "SOCKS4"),
]


@pytest.mark.parametrize(("variable", "scheme", "protocol"), KINDS)
def test_a_reward_server_that_only_a_proxy_reaches(
    monkeypatch: pytest.MonkeyPatch, variable: str, scheme: str, protocol: str
) -> None:
    with small_proxy() as proxy:
        monkeypatch.setenv(variable, f"{scheme}://127.0.0.1:{proxy.port}")
        assert asked(OUTSIDE, through=proxy) == [1.0, 2.0]
        assert set(proxy.asked) == {f"{protocol} {OUTSIDE}"}
        proxy.asked.clear()
        assert asked("127.0.0.1") == asked("localhost") == [1.0, 2.0]
        assert proxy.asked == []
        assert asked("127.0.0.1", OUTSIDE, through=proxy) == [1.0, 2.0]
        assert proxy.asked == [f"{protocol} {OUTSIDE}"]  # each address has a session of its own


async def failure() -> BadReward:
    """What a question at OUTSIDE fails with."""
    reward = HttpReward([f"http://{OUTSIDE}/score"], timeout_s=5.0, retries=0, patience=Patience(away_s=0.0))
    (bad,) = await ask(reward, "a")
    await reward.close()
    assert isinstance(bad, BadReward)
    return bad


def test_an_address_that_the_proxy_does_not_reach_names_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_proxy() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert asyncio.run(failure()).reason == "reward_http_502"
    monkeypatch.setenv("http_proxy", f"http://me:secret@{DEAD}")
    bad = asyncio.run(failure())
    assert bad.reason == "reward_unreachable" and "secret" not in str(bad)
    assert f"http://{OUTSIDE}/score cannot be reached through the proxy http://{DEAD}: " in str(bad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "variable", "scheme"),
    [
        *(("answers", *proxy) for proxy in (("http_proxy", "http"), ("ALL_PROXY", "socks5"))),
        *((f"{sys.executable} {FILE} prints", *proxy) for proxy in (("http_proxy", "http"), ("ALL_PROXY", "socks5"))),
    ],
)
def test_agents_reach_the_policy_directly(
    monkeypatch: pytest.MonkeyPatch, agent: str, variable: str, scheme: str
) -> None:
    """A function, with the client that it gets; a command, with a client of its own."""
    monkeypatch.setenv(variable, f"{scheme}://{DEAD}")
    assert only_episode(play(agent)).reward == 3.0


def test_what_a_proxy_of_socks_does_not_reach_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_proxy() as proxy:
        for url, says in ((f"127.0.0.1:{proxy.port}", "Host unreachable"), (DEAD, "Connect")):
            monkeypatch.setenv("ALL_PROXY", f"socks5://{url}")
            bad = asyncio.run(failure())
            assert bad.reason == "reward_unreachable" and says.lower() in str(bad).lower()
            assert f"cannot be reached through the proxy socks5h://{url}" in str(bad)


def test_an_endpoint_at_another_address_is_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    async def listening() -> None:
        async with an_endpoint(host="127.0.0.7"):
            pass

    asyncio.run(listening())
    assert "127.0.0.7" in os.environ["NO_PROXY"].split(",") and proxy_bypass("127.0.0.7:80")


IN_A_HOST = """
import asyncio, os
from flowrl.wire.connection import IpcTransport
from flowrl.runtime.process.actor import ProcessActor
from flowrl.runtime.process.engine import ProcessSpec
spec = ProcessSpec("A", "run", os.getpid(), "", {}, (), None, (), IpcTransport(), machines=("10.0.0.2", "node2"))
actor = ProcessActor(spec)
print(os.environ["NO_PROXY"])
asyncio.run(actor.stop())
"""


def test_processes_of_a_run_reach_its_machines_directly() -> None:
    environment = {**os.environ, "NO_PROXY": ".corp"}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_HOST], env=environment, capture_output=True, text=True, check=True
    )
    found = done.stdout.strip().split(",")
    assert found[:4] == [".corp", "localhost", "127.0.0.1", "::1"] and found[-2:] == ["10.0.0.2", "node2"]


def test_every_command_reaches_this_machine_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what it starts, such as Ray and the processes of functions that compute rewards."""
    from flowrl.cli import main

    monkeypatch.setenv("http_proxy", f"http://{DEAD}")
    assert main(["version"]) == 0
    assert proxy_bypass("127.0.0.1:80") and not proxy_bypass(OUTSIDE)

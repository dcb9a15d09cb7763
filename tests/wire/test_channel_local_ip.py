"""At which address a process of a cluster listens: at Ray's, which need not be that of the default route."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from flowrl.runtime.process.engine import meeting_place
from flowrl.wire.connection import TcpTransport, local_ip
from flowrl.wire.endpoint import Endpoint
from tests.wire.channel_rig import play


def joined(monkeypatch: pytest.MonkeyPatch, *, initialized: bool) -> None:
    """Ray, as far as it is asked, on a node that it calls 127.0.0.7."""
    ray = ModuleType("ray")
    ray.is_initialized = lambda: initialized  # type: ignore[attr-defined]
    ray.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.7")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)


def test_what_has_joined_ray_listens_at_rays_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        endpoint = Endpoint("A", run_id="test", driver_pid=1, transport=TcpTransport())
        assert (await endpoint.open()).tcp.startswith("tcp://127.0.0.7:")
        await endpoint.close()

    joined(monkeypatch, initialized=True)
    assert local_ip() == "127.0.0.7"
    assert meeting_place(alone=False).startswith("127.0.0.7:")
    assert meeting_place(alone=True).startswith("127.0.0.1:")
    play(main())


def test_without_ray_it_is_that_of_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    usual = local_ip()
    assert usual != "127.0.0.7"
    joined(monkeypatch, initialized=False)
    assert local_ip() == usual

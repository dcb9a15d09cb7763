"""The lookout: hosts that do not answer are named and waited for no longer than need be; proofs need quiet links."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.errors import Stalled
from flowrl.runtime.driver import lookout as lookout_module
from flowrl.runtime.driver import run_processes as processes_module
from flowrl.runtime.driver.lookout import Lookout, Topology
from flowrl.runtime.driver.run_processes import Orders, RunProcesses
from flowrl.testing import VirtualClock
from flowrl.wire.endpoint import Endpoint

CYCLE = Topology(
    producers={"b.inputs": ("a",)}, consumers={"a.items -> b.inputs": ("b",)}, servers={}, ticket_holders=()
)
A = {"replica_id": "a/0", "moves": 3, "alive": [], "waits": [("credit", "a.items -> b.inputs", 9.0)], "ended": False}
B = {"replica_id": "b/0", "moves": 4, "alive": [], "waits": [("item", "b.inputs", 9.0)], "ended": False}


class Process:
    """A host that answers `waits` with `report`, or not at all while it is stopped."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.report = report
        self.stopped = False
        self.asked = 0
        self.kept: list[Future[Any]] = []
        self.waits = SimpleNamespace(remote=self._asked)

    def _asked(self) -> Any:
        self.asked += 1
        answer: Future[Any] = Future()
        if self.stopped:
            self.kept.append(answer)
        else:
            answer.set_result([dict(self.report)])
        return SimpleNamespace(future=lambda: answer)

    def goes_on(self) -> None:
        self.stopped = False
        for answer in self.kept:
            answer.set_result([dict(self.report)])


Body = Callable[[Lookout, dict[str, Process], list[str]], Awaitable[None]]


def watched(body: Body, *, flush: Callable[[dict[str, Process]], Any] = lambda processes: None) -> None:
    """Run `body` with a lookout over two hosts, "a" and "b", in virtual time. `flush` happens in their flushes."""

    async def main() -> None:
        run_id, told = uuid.uuid4().hex[:10], []
        endpoints = {name: Endpoint(name, run_id=run_id, driver_pid=os.getpid()) for name in ("driver", "a", "b")}
        processes = {"a": Process(dict(A)), "b": Process(dict(B))}

        async def flushed(host: str, body: Any) -> None:
            assert body["peers"] == ["a", "b", "driver"]
            if (waits := flush(processes)) is not None:
                await waits

        for endpoint in endpoints.values():
            await endpoint.open()
            endpoint.on("flush", flushed)
        for name in processes:
            endpoints["driver"].connect(name, endpoints[name].address)
            endpoints[name].connect("driver", endpoints["driver"].address)
        hosts = RunProcesses(None, endpoints["driver"])  # type: ignore[arg-type]
        hosts._actors.update(processes)
        hosts._specs.update(
            {
                name: SimpleNamespace(places=[SimpleNamespace(node=name, replica=0, replica_id=f"{name}/0")])
                for name in "ab"
            }  # type: ignore[misc]
        )
        try:
            await body(
                Lookout(hosts, endpoints["driver"], CYCLE, told.append, lambda node, text: None), processes, told
            )
        finally:
            for endpoint in endpoints.values():
                await endpoint.close()

    VirtualClock().run(main())


def test_two_looks_with_quiet_links_between_them_prove_a_deadlock() -> None:
    async def body(lookout: Lookout, processes: dict[str, Process], told: list[str]) -> None:
        with pytest.raises(Stalled, match=r"a waits for credit of a\.items -> b\.inputs, held up by b"):
            await lookout.look_once()

    watched(body)


def test_what_was_under_way_between_the_looks_is_no_deadlock() -> None:
    def arrives(processes: dict[str, Process]) -> None:
        processes["b"].report["moves"] += 1

    async def body(lookout: Lookout, processes: dict[str, Process], told: list[str]) -> None:
        await lookout.look_once()

    watched(body, flush=arrives)


def test_a_link_that_does_not_come_to_rest_proves_nothing() -> None:
    async def body(lookout: Lookout, processes: dict[str, Process], told: list[str]) -> None:
        await lookout.look_once()

    watched(body, flush=lambda processes: asyncio.get_running_loop().create_future())


def test_a_host_that_does_not_answer_is_named_once_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout_module, "REPORT_AFTER_S", 0.0)

    async def body(lookout: Lookout, processes: dict[str, Process], told: list[str]) -> None:
        processes["b"].stopped = True
        await lookout.look_once()
        assert len(told) == 1 and told[0].startswith("host 'b' (b/0) has not answered for 0 s"), told
        text = await lookout.describe_now()
        assert "a/0 waits: credit of a.items -> b.inputs for 9 s" in text
        assert "b/0 works: its process, host 'b', has not answered for 0 s: it is stopped" in text
        assert processes["b"].asked == 1 and processes["a"].asked == 2
        processes["b"].goes_on()
        with pytest.raises(Stalled):
            await lookout.look_once()
        assert told[1:] == ["host 'b' answers again"]

    watched(body)


def test_a_silent_host_that_is_lost_does_not_answer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout_module, "REPORT_AFTER_S", 0.0)

    async def body(lookout: Lookout, processes: dict[str, Process], told: list[str]) -> None:
        processes["b"].stopped = True
        await lookout.look_once()
        lookout._processes.lost.add("b")
        await lookout.look_once()
        assert len(told) == 1 and processes["b"].asked == 1
        assert "b/0" not in await lookout.describe_now()

    watched(body)


def test_whose_answer_is_long_in_coming_is_told() -> None:
    async def main() -> None:
        late: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def request(host: str, kind: str, body: Any) -> int:
            return await late if host == "b" else 1

        endpoint: Any = SimpleNamespace(request=request)
        told: list[str] = []
        plan: Any = None
        asked = asyncio.create_task(Orders(endpoint, plan, ["a", "b"], told.append).ask_all("pause"))
        await asyncio.sleep(processes_module.WARN_AFTER_S - 1)  # of virtual time
        assert not told
        await asyncio.sleep(2)  # of virtual time
        late.set_result(2)
        assert await asked == [1, 2]
        assert told == ["'pause' waits for b, for 0 s now"]

    VirtualClock().run(main())


def test_what_the_driver_does_is_told_and_is_no_deadlock() -> None:
    async def body(lookout: Lookout, processes: dict[str, Process], told: list[str]) -> None:
        processes["a"].report["waits"].append(("ticket", "a.items", 9.0))
        with lookout.note_work("the checkpoint of step 3"):
            await lookout.look_once()
            assert "the driver: the checkpoint of step 3" in await lookout.describe_now()
        with pytest.raises(Stalled):
            await lookout.look_once()

    watched(body)

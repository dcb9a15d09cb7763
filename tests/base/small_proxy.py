"""A real proxy on loopback, of HTTP (whole URLs and CONNECT) and of SOCKS 4a and 5."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LOST = (ConnectionError, asyncio.IncompleteReadError)


@dataclass
class SmallProxy:
    hosts: Mapping[str, int] = field(default_factory=dict)
    """Name that no other resolver has -> port on loopback."""
    asked: list[str] = field(default_factory=list)
    """"PROTOCOL HOST" of every connection that it was asked for."""
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*LOST, asyncio.CancelledError), contextlib.closing(writer):
            first = await reader.readexactly(1)
            serve = {b"\4": self._socks4, b"\5": self._socks5}.get(first)
            await (self._http(first, reader, writer) if serve is None else serve(reader, writer))

    async def _http(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, _, headers = (first + await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
        method, target, _ = line.decode().split(" ")
        connects = method == "CONNECT"
        parts = urlsplit(f"//{target}" if connects else target)
        host = parts.hostname or ""
        there = await self._connected("CONNECT" if connects else "HTTP", host)
        if there is None:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            return
        if connects:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            # Servers of MCP answer no request for another host than their own.
            headers = re.sub(rb"(?im)^host: [^\r]*", f"Host: 127.0.0.1:{self.hosts[host]}".encode(), headers)
            if b"upgrade:" not in headers.lower():  # the next request may be for another server
                headers = b"Connection: close\r\n" + re.sub(rb"(?im)^connection: [^\r]*\r\n", b"", headers)
            there[1].write(f"{method} {parts.path or '/'} HTTP/1.1\r\n".encode() + headers)
        await _joined(reader, writer, *there)

    async def _socks4(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(7)
        await reader.readuntil(b"\0")
        host = (await reader.readuntil(b"\0"))[:-1].decode()
        there = await self._connected("SOCKS4", host)
        writer.write(bytes((0, 91 if there is None else 90)) + bytes(6))
        if there is not None:
            await _joined(reader, writer, *there)

    async def _socks5(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly((await reader.readexactly(1))[0])
        writer.write(b"\5\0")
        assert (await reader.readexactly(4))[3] == 3, "only names"
        host = (await reader.readexactly((await reader.readexactly(1))[0])).decode()
        await reader.readexactly(2)
        there = await self._connected("SOCKS5", host)
        writer.write(bytes((5, 4 if there is None else 0, 0, 1)) + bytes(6))
        if there is not None:
            await _joined(reader, writer, *there)

    async def _connected(self, protocol: str, host: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        self.asked.append(f"{protocol} {host}")
        return await asyncio.open_connection("127.0.0.1", self.hosts[host]) if host in self.hosts else None


async def _joined(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    reader_there: asyncio.StreamReader,
    writer_there: asyncio.StreamWriter,
) -> None:
    """Copies both ways until one side ends."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*LOST):
            while part := await source.read(1 << 16):
                target.write(part)
                await target.drain()

    ways = [asyncio.create_task(copy(*way)) for way in ((reader, writer_there), (reader_there, writer))]
    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    for way in ways:
        way.cancel()
    writer_there.close()


@contextlib.contextmanager
def small_proxy(hosts: Mapping[str, int] | None = None) -> Iterator[SmallProxy]:
    """A proxy in a thread of its own."""
    proxy, ready, loop = SmallProxy(hosts or {}), threading.Event(), asyncio.new_event_loop()

    async def life(over: asyncio.Event) -> None:
        server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]
        ready.set()
        await over.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    over = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(life(over)))
    thread.start()
    ready.wait()
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()

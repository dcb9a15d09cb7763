"""A connection to the head of a Ray cluster, kept only to detect that the head has ended.

Ray's library ends a driver that has not reached the head for a minute, whatever the driver does. A head may return
earlier, if the cluster keeps its state, so a lost connection is retried for some seconds.
"""

from __future__ import annotations

import asyncio
import socket

RETRY_S = 1.0
PROBES = ((socket.SO_KEEPALIVE, 1), (socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""Keepalive options: they break the connection when the other machine was switched off."""


async def outlive(address: tuple[str, int], *, patience_s: float) -> None:
    """Returns when no process has listened at `address` for `patience_s` seconds."""
    loop = asyncio.get_running_loop()
    last_s = loop.time()
    while loop.time() - last_s < patience_s:
        try:
            async with asyncio.timeout(patience_s):
                reader, writer = await asyncio.open_connection(*address)
        except OSError:  # TimeoutError is an OSError
            await asyncio.sleep(RETRY_S)
            continue
        start_s = loop.time()
        await _until_it_breaks(reader, writer)
        last_s = loop.time()
        if last_s - start_s < RETRY_S:  # a server may close a connection at once that does not use its protocol
            await asyncio.sleep(RETRY_S)


async def _until_it_breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    (keep, on), *details = PROBES
    link: socket.socket = writer.get_extra_info("socket")
    link.setsockopt(socket.SOL_SOCKET, keep, on)
    for option, value in details:
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        while await reader.read(4096):  # discard what the server sends
            pass
    except OSError:
        pass
    finally:
        writer.close()

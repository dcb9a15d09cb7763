"""Which addresses are reached through a proxy of the environment, and which directly.

`http_proxy`, `https_proxy`, `all_proxy` and `no_proxy`, in small or capital letters, are for addresses outside of a
run: the loopback interface, this machine and the run's other machines are always reached directly. Our own clients ask
`proxy_of`; the programs that a process starts inherit what `reach_directly` writes into its environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from flowrl.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

LOOPBACK = ("localhost", "127.0.0.1", "::1")
EXCEPTIONS = ("NO_PROXY", "no_proxy")
"""Variables with the hosts that need no proxy. Programs differ in which of the two they read."""
KINDS = {"ws": "http", "wss": "https"}
"""Scheme of a websocket -> scheme whose proxy it goes through."""
SCHEMES = {
    "http": "http",
    "https": "https",
    "socks": "socks5h",
    "socks5": "socks5h",
    "socks5h": "socks5h",
    "socks4": "socks4a",
    "socks4a": "socks4a",
}
"""Scheme of a proxy -> the one that is used. SOCKS proxies resolve names, which may be known only to them."""
SOCKS_PORT = 1080


def reach_directly(*hosts: str) -> None:
    """Let the programs that this process starts, and clients in it, reach `hosts` and this machine without a proxy."""
    os.environ.update(exceptions(os.environ, socket.gethostname(), *hosts))


def exceptions(variables: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """The values of EXCEPTIONS in `variables`, with the loopback interface and `hosts` added.

    IPv6 addresses have no brackets: with them, older releases of httpx refuse the whole list.
    """
    given = [variables.get(name, "") for name in EXCEPTIONS]
    values = [value or next(filter(None, given), "") for value in given]
    found = {}
    for name, value in zip(EXCEPTIONS, values, strict=True):
        entries = list(_split_entries(value))
        more = ",".join(dict.fromkeys((*entries, *LOOPBACK, *filter(None, hosts))))
        found[name] = value if "*" in entries else more
    return found


def _split_entries(value: str) -> Iterator[str]:
    return filter(None, (entry.strip() for entry in value.split(",")))


def proxy_of(url: str) -> str:
    """The URL of the proxy through which `url` is reached; "" if it is reached directly.

    Its scheme is one of http, https, socks5h and socks4a. Raises ConfigError if the environment's proxy has no address.
    """
    from urllib.request import getproxies_environment  # imports much, which few commands need

    parts = urlsplit(url)
    host, found = parts.hostname or "", getproxies_environment()
    proxy = found.get(KINDS.get(parts.scheme, parts.scheme)) or found.get("all") or ""
    if not proxy or _is_here(host) or _is_excepted(host, parts.port, found.get("no", "")):
        return ""
    return _complete_url(proxy if "://" in proxy else f"http://{proxy}", host)


def _complete_url(proxy: str, host: str) -> str:
    """The proxy's URL as `proxy_of` returns it, for requests to `host`."""
    try:
        parts = urlsplit(proxy)
        if parts.scheme in SCHEMES and parts.hostname and parts.port != 0:
            scheme, netloc = SCHEMES[parts.scheme], parts.netloc.rstrip(":")
            return f"{scheme}://{netloc}{f':{SOCKS_PORT}' if 'socks' in scheme and not parts.port else ''}"
    except ValueError:  # a port that is no number
        pass
    raise ConfigError(
        f"the proxy {shown_proxy(proxy)!r} that the environment has for {host} is no address of a proxy; it needs "
        f"SCHEME://HOST:PORT with one of the schemes {', '.join(SCHEMES)}; correct it, or add {host} to NO_PROXY"
    )


def shown_proxy(proxy: str) -> str:
    """The URL of a proxy without its user and password."""
    parts = urlsplit(proxy)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], "", "", ""))


def _is_here(host: str) -> bool:
    """Whether `host` is this machine: a name of the loopback interface, or an address that a socket can have here."""
    if host == "localhost" or host.endswith(".localhost") or host == socket.gethostname():
        return True
    try:
        family = socket.AF_INET6 if ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except (OSError, ValueError):
        return False
    return True


def _is_excepted(host: str, port: int | None, value: str) -> bool:
    """Whether the list `value` of NO_PROXY has `host`: itself, as HOST:PORT, its domain, its network, or `*`."""
    for entry in _split_entries(value.lower()):
        name = entry.removeprefix("*").lstrip(".").strip("[]")
        if entry == "*" or name in (host, f"{host}:{port}") or (name and host.endswith(f".{name}")):
            return True
        try:
            if "/" in name and ip_address(host) in ip_network(name, strict=False):
                return True
        except ValueError:
            continue
    return False


def open_session(url: str, **options: Any) -> aiohttp.ClientSession:
    """A session of aiohttp for requests to the host of `url`, through its proxy if it has one. Raises ConfigError.

    What prevents a connection through a SOCKS proxy is an `aiohttp.ClientConnectionError`, as it is with other proxies.
    """
    import aiohttp

    proxy = proxy_of(url)
    if proxy.startswith("socks"):
        return aiohttp.ClientSession(connector=_make_socks_connector(proxy), **options)
    return aiohttp.ClientSession(proxy=proxy or None, **options)


def _make_socks_connector(proxy: str) -> aiohttp.BaseConnector:
    import aiohttp

    try:
        from aiohttp_socks import ProxyConnectionError, ProxyConnector, ProxyError, ProxyTimeoutError  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise ConfigError(
            f"the proxy {shown_proxy(proxy)} needs the package aiohttp-socks: pip install aiohttp-socks"
        ) from None

    class Connector(ProxyConnector):  # type: ignore[misc, unused-ignore]
        async def connect(self, *args: Any, **options: Any) -> Any:
            try:
                return await super().connect(*args, **options)
            except (ProxyError, ProxyConnectionError, ProxyTimeoutError, OSError) as problem:
                raise aiohttp.ClientConnectionError(str(problem)) from None

    plain = proxy.replace("socks5h:", "socks5:", 1).replace("socks4a:", "socks4:", 1)
    return Connector.from_url(plain, rdns=True)  # type: ignore[no-any-return, unused-ignore]

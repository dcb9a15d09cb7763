"""How the endpoints of a run reach each other: `IpcTransport` on one machine, `TcpTransport` on several.

The driver chooses one transport for the whole run and passes it to every host in the host's spec: a transport is plain
data. CURVE keys are part of `TcpTransport`, so no endpoint listens or connects on tcp without them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from flowrl.channel.links.address import Address, CurveKeys, local_ip
from flowrl.channel.links.link import Listener, Target
from flowrl.errors import ConfigError


@dataclass(frozen=True)
class IpcTransport:
    """Every endpoint listens on a unix socket. All processes are on one machine."""

    spans_machines: ClassVar[bool] = False

    def open(self, listener: Listener, path: Path) -> str:
        """Listen at the unix socket `path`. Returns the url for other machines, "" if there is none."""
        listener.bind(Target(f"ipc://{path}"))
        path.chmod(0o600)
        return ""

    def target(self, there: Address, *, near: bool) -> Target:
        """What a link to the endpoint at `there` connects to; `near` if that endpoint is on this machine.

        Raises ConfigError if that endpoint is out of reach.
        """
        if near:
            return Target(f"ipc://{there.ipc}")
        raise ConfigError(
            f"host {there.host!r} is on another machine, which this endpoint cannot reach over ipc; give every "
            "endpoint of the run one TcpTransport"
        )


@dataclass(frozen=True)
class TcpTransport(IpcTransport):
    """Every endpoint also listens on tcp, encrypted with the run's keys, for links between machines."""

    keys: CurveKeys = field(default_factory=CurveKeys.new)
    ip: str = ""
    """Where to listen; "" is the IP address at which other machines reach this one."""
    spans_machines: ClassVar[bool] = True

    def open(self, listener: Listener, path: Path) -> str:
        super().open(listener, path)
        return listener.bind(Target(f"tcp://{self.ip or local_ip()}:*", self.keys))

    def target(self, there: Address, *, near: bool) -> Target:
        if near:
            return super().target(there, near=True)
        if there.tcp:
            return Target(there.tcp, self.keys)
        raise ConfigError(
            f"host {there.host!r} is on another machine and does not listen on tcp; give its endpoint the run's "
            "TcpTransport"
        )


EndpointTransport = IpcTransport | TcpTransport

"""How an endpoint listens, and what it allows."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.errors import ConfigError


@dataclass(frozen=True)
class EndpointSettings:
    context_tokens: int
    """The model's length: tokens of a context with its reply."""
    turn_tokens: int
    """Most tokens of a reply; a call may ask for less."""
    temperature: float = 1.0
    """The graph's, which calls take whatever they ask for; a header says so. A session's task may name another one."""
    top_p: float = 1.0
    models: tuple[str, ...] = ("policy",)
    """Names that calls may give to the policy. A call for another model is refused."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 is any free port."""
    key_file: str = ""
    """Where the run's key is written, for its user's eyes alone, while the endpoint is open; "" is nowhere."""
    sessions: int = 1024
    """Most that are open; further ones are refused with 429."""
    session_calls: int = 64
    """Most calls of a session at a time; further ones are refused with 429."""
    idle_s: float = 600.0
    """A session that asks nothing for so long, with no call open, is ended as `session_idle`."""
    keep_alive_s: float = 10.0
    """Between signs of life in a stream whose reply is not complete."""
    leave_s: float = 2.0
    """How long a call goes on without its client, which may be about to retry: SDKs do within a second."""
    body_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        for name in ("context_tokens", "turn_tokens", "sessions", "session_calls", "body_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} of an endpoint has to be above 0")
        for name in ("idle_s", "keep_alive_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} of an endpoint has to be above 0")
        if self.leave_s < 0 or not self.models:
            raise ConfigError("leave_s of an endpoint has to be 0 or more, and models needs a name")

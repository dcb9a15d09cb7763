"""How an endpoint listens, and what it allows."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.errors import ConfigError


@dataclass(frozen=True)
class EndpointSettings:
    context_tokens: int
    """The model's context length: maximum number of tokens in a context and its reply together."""
    turn_tokens: int
    """Maximum number of tokens in a reply; a call may ask for fewer."""
    temperature: float = 1.0
    """The graph's temperature, which is used even if a call asks for another; a header says so. A session's task may
    set another one."""
    top_p: float = 1.0
    models: tuple[str, ...] = ("policy",)
    """Names that calls may give to the policy. A call for another model is refused."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 is any free port."""
    key_file: str = ""
    """File with the run's key, which only its user can read, while the endpoint is open; "": no file."""
    sessions: int = 1024
    """Maximum number of open sessions; further ones are refused with 429."""
    session_calls: int = 64
    """Maximum number of calls of a session at a time; further ones are refused with 429."""
    idle_s: float = 600.0
    """Seconds after which a session that asks nothing and has no open call is ended as `session_idle`."""
    keep_alive_s: float = 10.0
    """Seconds between keep-alive messages in a stream whose reply is not complete."""
    leave_s: float = 2.0
    """Seconds for which a call continues without its client, which may be about to retry: SDKs do within a second."""
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

"""What an endpoint is given: its settings, and the interfaces behind it. `Backend` samples replies, and `Sessions`
hands out tasks.

Array axes: N sampled tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowrl.agents.conversation import TokenSequence
from flowrl.errors import ConfigError
from flowrl.messages import Float32, Int32
from flowrl.models.tokens.chat import Messages

FINISHED_BY = ("stop", "length")


@dataclass(frozen=True)
class SampledAnswer:
    """One reply of the policy. Raises ValueError if it has no tokens, or arrays of several lengths."""

    token_ids: Int32
    """[N], the end token included if it was sampled, and the tokens of a stop text."""
    logprobs: Float32
    """[N]"""
    versions: Int32
    """[N]"""
    finish_reason: str
    """stop | length"""
    text: str
    """Decoded without special tokens, and without the stop text that ended it."""
    message: Mapping[str, Any] | None = None
    """The reply as parsed: `content`, `reasoning_content`, `tool_calls` whose arguments are mappings. None: a message
    with only the text. The ids of calls may be missing."""
    stop_text: str = ""
    """The call's stop text that ended the reply, "" if none did."""
    cached_tokens: int = 0
    """Tokens of the context that were in the prefix cache."""
    request_id: str = ""
    """The backend's own id of the request; `FinishedSession.request_ids` says which requests were used."""

    def __post_init__(self) -> None:
        sizes = {self.token_ids.size, self.logprobs.size, self.versions.size}
        if len(sizes) > 1 or 0 in sizes:
            raise ValueError(f"an answer has arrays of {sorted(sizes)} tokens; it needs one length above 0")
        if self.finish_reason not in FINISHED_BY:
            raise ValueError(f"finish_reason is {self.finish_reason!r}; it has to be {' or '.join(FINISHED_BY)}")


class Backend(Protocol):
    """Samples replies with the graph's temperature and top_p."""

    async def reply(
        self, session: str, context_ids: Int32, *, max_tokens: int, stop: tuple[str, ...], tools: Messages
    ) -> SampledAnswer:
        """One reply to a context. Cancelling aborts the sampling. Several replies may be asked for at the same time.

        `tools` are those that the reply may call, which its parser needs. Raises Unavailable or Busy, which the client
        sees as 503 and 429, or LimitReached; any other exception is a 500.
        """
        ...


class SessionRefused(Exception):
    """The text tells the client why; it may ask again after `retry_after_s`."""

    def __init__(self, reason: str, *, retry_after_s: int = 1) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Unavailable(SessionRefused):
    """Nothing behind the endpoint can answer now: no generator, no further task."""


class Busy(SessionRefused):
    """Everything behind the endpoint is taken."""


class RunEnded(Exception):
    """There will never be a further task. The client sees a 410 with this text."""


class LimitReached(Exception):
    """The session may not ask for more. The client sees a 409 with this text, and is told not to retry."""


@dataclass(frozen=True)
class SessionTask:
    """The task of an agent, and the name of its session."""

    session_id: str
    """Letters, digits, - and _; unique within the run."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """The row, as JSON."""
    temperature: float | None = None
    """Temperature with which the session's replies are sampled; None: that of the endpoint's settings."""
    top_p: float | None = None


@dataclass(frozen=True)
class FinishedSession:
    """An ended session with all that it sampled."""

    session_id: str
    sequences: tuple[TokenSequence, ...]
    request_ids: tuple[str, ...]
    """Requests whose answers are in the sequences, in the order clients received them. Others were abandoned."""
    reward: float | None
    full: bool
    """Whether a call was refused because its context left no place for a reply."""
    cause: str
    """ "" if the session has a reward and was ended by its client; else session_idle | no_reward."""


class Sessions(Protocol):
    """Hands out tasks, and takes sessions back."""

    async def next_task(self) -> SessionTask:
        """The next task, with which a session starts. A cancelled call takes no task. Raises Unavailable, Busy or
        RunEnded."""
        ...

    def finished(self, session: FinishedSession) -> None:
        """A session has ended; called once for each."""
        ...


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

"""`openenv/URL`: an environment behind a server of OpenEnv, by its websocket protocol.

An episode is a connection to `URL/ws`, where each message is a JSON object with `type` and `data`: `reset` with the
row's seed and `step` with an action are answered by `observation` (with `reward` and `done`) or by `error`; `close`
ends the session. The server's `/schema` says what an action is. If an action requires only one field, and that is text,
a reply is that field's value; else a reply is a JSON object, and the first observation shows its schema.

An observation that consists of a single text is shown as that text, any other as JSON. A reply that is no action is
answered with what is wrong with it, by the server or here, and the third in a row truncates the episode. A server that
ends the connection or has no session left is `env_unreachable`. Options are passed to `reset` together with the seed.

Waits: only for the server, until its answer, the end of the connection, or the episode's limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from flowrl.environments.environment_row import EnvironmentName
from flowrl.environments.protocol import Action, Env, MalformedValue, Observation, Step
from flowrl.errors import ConfigError
from flowrl.machine.proxies import open_session

SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
"""Scheme of the address -> scheme of its pages; aiohttp opens websockets by either."""
MOST_MALFORMED = 3
"""Replies in a row that are no action; this many truncate the episode."""
MESSAGE_BYTES = 100 << 20
"""A longer message from the server ends the connection. The package's own client has the same limit."""
OF_EVERY_ACTION = "metadata"
"""A field that all actions have, and that need not be filled."""


class OpenenvEnv(Env):
    """One session of a server."""

    cooperative = True

    @classmethod
    def load_maker(cls, name: EnvironmentName) -> Callable[[], OpenenvEnv]:
        """Raises ConfigError if the address is invalid. The server is asked at `reset`, not here."""
        scheme, _, rest = name.place.partition("://")
        if scheme not in SCHEMES or not rest:
            raise ConfigError(f"environment {name.text!r} has no address; write openenv/http://HOST:PORT")
        if "seed" in name.options:
            raise ConfigError(f"environment {name.text!r} has the option seed, which its rows decide; remove it")
        return lambda: cls(f"{SCHEMES[scheme]}://{rest.rstrip('/')}", name.options)

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url, self._options = url, options
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._malformed = self._malformed_in_a_row = 0
        self._rewarded = False

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        try:
            self._session = open_session(self._url, timeout=aiohttp.ClientTimeout())
            async with self._session.get(f"{self._url}/schema") as response:
                response.raise_for_status()
                schema = (await response.json()).get("action")
            if not isinstance(schema, Mapping):
                raise MalformedValue(f"the server at {self._url} does not say what an action is")
            self._socket = await self._session.ws_connect(f"{self._url}/ws", max_msg_size=MESSAGE_BYTES)
        except aiohttp.ClientError as problem:
            raise ConnectionError(f"{self._url}: {problem}") from None
        # A reply fills the only field that an action needs, if that is text; else it is the whole action.
        needed = [key for key in schema.get("required", ()) if key != OF_EVERY_ACTION]
        properties = schema.get("properties", {})
        only_text = len(needed) == 1 and properties.get(needed[0], {}).get("type") == "string"
        self._field = str(needed[0]) if only_text else None
        found = await self._exchange_message("reset", {"seed": seed, **self._options})
        how = "" if self._field else f"\n\nAnswer with a JSON object. Its schema: {json.dumps(schema)}"
        return Observation(observation_text(found) + how)

    async def step(self, action: Action) -> Step:
        try:
            told: Any = {self._field: action.text}
            if self._field is None:
                try:
                    told = json.loads(action.text)
                except (ValueError, RecursionError):
                    told = None
                if not isinstance(told, dict):
                    raise NoAction("This reply is no JSON object. Answer with one that has the schema of an action.")
            found = await self._exchange_message("step", told)
        except NoAction as misfit:
            self._malformed += 1
            self._malformed_in_a_row += 1
            over = self._malformed_in_a_row == MOST_MALFORMED
            return Step(Observation(str(misfit)), truncated=over, metrics={"malformed": self._malformed})
        self._malformed_in_a_row = 0
        reward, done = found.get("reward"), bool(found.get("done"))
        self._rewarded |= reward is not None
        if done and not self._rewarded:
            raise MalformedValue(f"the server at {self._url} ended the episode without any reward")
        metrics = {"malformed": self._malformed}
        return Step(Observation(observation_text(found)), reward or 0.0, terminated=done, metrics=metrics)

    async def close(self) -> None:
        try:
            if self._socket is not None and not self._socket.closed:
                await self._socket.send_json({"type": "close"})
                await self._socket.close()
        except (aiohttp.ClientError, ConnectionError):
            return  # the server ends a session whose connection is gone
        finally:
            if self._session is not None:
                await self._session.close()

    async def _exchange_message(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The data of the observation that answers a message. Raises NoAction, ConnectionError, MalformedValue."""
        assert self._socket is not None
        try:
            await self._socket.send_json({"type": kind, "data": data})
            message = await self._socket.receive()
        except aiohttp.ClientError as problem:
            raise ConnectionError(f"{self._url}: {problem}") from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the server at {self._url} ended the session")
        answer = json.loads(message.data)
        content = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(content, dict) or answer.get("type") not in ("observation", "error"):
            raise MalformedValue(f"the server at {self._url} answered {kind} with {message.data[:200]!r}")
        if answer["type"] == "observation":
            return content
        said, code = str(content.get("message")), content.get("code")
        if code == "VALIDATION_ERROR" and kind == "step":
            errors = content.get("errors") or ()
            misfits = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in errors]
            raise NoAction(f"{said}: {'; '.join(misfits)}.")
        if code == "CAPACITY_REACHED":
            raise ConnectionError(f"the server at {self._url} has no session left: {said}")
        raise RuntimeError(f"the server at {self._url} failed at {kind} ({code}): {said}")


class NoAction(Exception):
    """A reply that is no action; the text is for the policy."""


def observation_text(found: Mapping[str, Any]) -> str:
    shown = found.get("observation")
    if isinstance(shown, Mapping):
        (only,) = shown.values() if len(shown) == 1 else (None,)
        return only if isinstance(only, str) else json.dumps(shown, ensure_ascii=False)
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)

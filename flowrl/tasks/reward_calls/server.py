"""The server for `flowrl.tasks.reward_calls.http`: a reward function or model, called over HTTP.

POST /score  {"prompts": [...], "responses": [...], "columns": {name: [...]}}
             200 {"rewards": [...], "scores": [...], "logs": {name: [...]}, "heads": {name: weight}}
             heads: those of logs whose weighted sum is the reward; {} if it is no such sum
             400 for an invalid request, 422 if the function behind it has no verdict
GET /health  {"serving": name, "answered": number of samples}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowrl.tasks.reward_calls.judge import BadReward, RowColumns
from flowrl.tasks.reward_calls.reward_client import RewardClient

if TYPE_CHECKING:
    from aiohttp import web

LARGEST_REQUEST_BYTES = 256 << 20


class BadRequest(Exception):
    """An invalid request; the text states what is missing."""


class RewardServer:
    """Answers requests with the verdicts of `client`."""

    def __init__(self, name: str, client: RewardClient) -> None:
        self.name = name
        self._client = client
        self._answered = 0

    def app(self) -> web.Application:
        """The aiohttp application; it closes the client when it ends."""
        from aiohttp import web

        app = web.Application(client_max_size=LARGEST_REQUEST_BYTES)
        app.add_routes([web.post("/score", self._score), web.get("/health", self._health)])
        app.on_cleanup.append(self._close)
        return app

    async def _score(self, request: web.Request) -> web.Response:
        from aiohttp import web

        try:
            prompts, responses, columns = _asked(await request.text())
        except BadRequest as bad:
            return web.json_response({"error": str(bad)}, status=400)
        try:
            verdicts = await self._client.ask(prompts, responses, columns)
        except BadReward as bad:
            return web.json_response({"error": str(bad), "reason": bad.reason}, status=422)
        self._answered += len(prompts)
        logs, heads = dict(verdicts.logs), dict(verdicts.heads)
        return web.json_response({"rewards": verdicts.rewards, "scores": verdicts.scores, "logs": logs, "heads": heads})

    async def _health(self, request: web.Request) -> web.Response:
        from aiohttp import web

        return web.json_response({"serving": self.name, "answered": self._answered})

    async def _close(self, app: web.Application) -> None:
        await self._client.close()


def _asked(text: str) -> tuple[Sequence[str], Sequence[str], RowColumns]:
    """(prompts, responses, columns of each sample) of a request's body. Raises BadRequest."""
    try:
        body = json.loads(text)
    except ValueError as problem:
        raise BadRequest(f"the body is not valid JSON ({problem})") from None
    if not isinstance(body, Mapping):
        raise BadRequest(f"the body is a {type(body).__name__}; it needs an object with prompts and responses")
    prompts, responses = _texts(body, "prompts"), _texts(body, "responses")
    columns = body.get("columns", {})
    if not isinstance(columns, Mapping):
        raise BadRequest("columns is not an object; it needs a list for each name")
    lengths = {"responses": len(responses), **{name: _length(values) for name, values in columns.items()}}
    for name, length in lengths.items():
        if length != len(prompts):
            raise BadRequest(f"there are {len(prompts)} prompts, but {length} of {name}")
    return prompts, responses, [{name: columns[name][i] for name in columns} for i in range(len(prompts))]


def _texts(body: Mapping[str, Any], name: str) -> list[str]:
    values = body.get(name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise BadRequest(f"{name} is {str(values)[:60]!r}; it needs a list of texts")
    return values


def _length(values: Any) -> int:
    return len(values) if isinstance(values, list) else -1

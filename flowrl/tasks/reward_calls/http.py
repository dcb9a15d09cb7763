"""Rewards over HTTP: waiting questions are sent together to the least busy server, and again after a failure.

Request: POST, JSON {"prompts": [...], "responses": [...], "columns": {name: [...]}}; `columns` holds the rows' other
columns and, under `messages`, the conversation before the response if it is known.
Answer: the same as from a reward function, a list of numbers or {"rewards": [...], "scores": [...], "logs": {name:
[...]}}. `heads`, if present, maps names of `logs` to weights, and the weighted sum of those logs is the reward: then
--task.reward-weights can change the weights. `flowrl serve-reward` is such a server.

A server of OpenRLHF's kind gets `query` (prompts with responses) and `labels` as well, and may answer `extra_logs`.

Waits: a question waits for its answer, at most until `retries` further tries of `timeout_s` each have failed. A try
that reaches no server does not count, unless servers answer other requests meanwhile: it is repeated until the outage
ends, with an answer or with ServersAway (`flowrl.tasks.reward_calls.away`).
A request for several samples that fails for a reason that one of them may have caused is asked again in halves, until
the samples that fail are alone (`flowrl.tasks.reward_calls.halves`); what concerns the server itself is not.
While a server works on its requests, further questions accumulate and form the next request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowrl.proxies import open_session, proxy_of, shown_proxy
from flowrl.tasks.reward_calls.away import BACKOFF_S, PATIENT, Outage, Patience, ServersAway, pause_s, retry_after_s
from flowrl.tasks.reward_calls.conventions import label_of, openrlhf_answer
from flowrl.tasks.reward_calls.halves import Halves, may_be_one
from flowrl.tasks.reward_calls.judge import BadReward, RowColumns, Verdicts, as_verdicts, is_finite, joined
from flowrl.tasks.reward_calls.question import Question, fail, one_of

if TYPE_CHECKING:
    import aiohttp

RETRIES = 4
CONNECT_S = 5.0
"""A server that has not accepted a connection in this time, or in half of `timeout_s` if that is less, is
unreachable."""
LONGEST_ERROR = 400
BATCH = 32
"""Maximum number of samples in one request."""
REQUESTS_PER_URL = 2
TRANSIENT = frozenset({408, 425, 429, 500})
AWAY = frozenset({502, 503, 504})
"""The answers of a proxy whose server cannot be reached, or of a server that is not ready."""


class Transient(Exception):
    """A failure that may not occur in another try or on another server. `asked_s` is the pause that the server asks
    for."""

    def __init__(self, bad: BadReward, *, asked_s: float = 0.0) -> None:
        self.bad = bad
        self.asked_s = asked_s
        super().__init__(str(bad))


class Unreached(Transient):
    """The server was not reached."""


class HttpReward:
    """One endpoint at several addresses. Raises BadReward for a sample that gets no verdict.

    At most `per_url` requests times the number of servers are under way at a time: by default, for each server, one
    that it processes and one in transit.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float,
        retries: int = RETRIES,
        backoff_s: float = BACKOFF_S,
        batch: int = BATCH,
        of_openrlhf: bool = False,
        per_url: int = REQUESTS_PER_URL,
        patience: Patience = PATIENT,
    ) -> None:
        self.urls = tuple(urls)
        self.timeout_s = timeout_s
        self.retries = retries
        self.backoff_s = backoff_s
        self.batch = batch
        self.of_openrlhf = of_openrlhf
        self.per_url = per_url
        self._patience = patience
        self._outage = Outage(self.urls, patience, backoff_s)
        self._busy = dict.fromkeys(self.urls, 0)
        self._waiting: list[Question] = []
        self._requests: set[asyncio.Task[None]] = set()
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        """URL -> its session; each may have a proxy of its own."""

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> Verdicts:
        loop = asyncio.get_running_loop()
        questions = [
            Question(prompt, response, dict(row), loop.create_future())
            for prompt, response, row in zip(prompts, responses, columns, strict=True)
        ]
        self._waiting += questions
        self._send()
        try:
            await self._answered({question.verdict for question in questions})
        finally:
            for question in questions:
                if not question.verdict.cancel():
                    question.verdict.exception()  # mark it as retrieved; only the first one is raised
        return joined([question.verdict.result() for question in questions])

    async def _answered(self, pending: set[asyncio.Future[Verdicts]]) -> None:
        """Wait for all verdicts, within `patience.outside` while no server can be reached."""
        while pending:
            outage = self._outage
            with nullcontext() if outage.since is None else self._patience.outside(outage.what):
                changed = outage.changed()
                waited: set[asyncio.Future[Any]] = {*pending, changed}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            pending = {verdict for verdict in pending if not verdict.done()}

    async def close(self) -> None:
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        for session in self._sessions.values():
            await session.close()

    def _send(self) -> None:
        """Send requests for the waiting questions, as many as the servers may have."""
        self._waiting = [question for question in self._waiting if not question.verdict.done()]
        while self._waiting and len(self._requests) < self.per_url * len(self.urls):
            questions, self._waiting = self._waiting[: self.batch], self._waiting[self.batch :]
            request = asyncio.get_running_loop().create_task(self._answer(questions))
            self._requests.add(request)
            request.add_done_callback(self._ended)

    def _ended(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        if not request.cancelled():
            request.result()
            self._send()

    async def _answer(self, questions: Sequence[Question]) -> None:
        """Set verdicts for all questions. A problem with one sample does not affect the others."""
        halves = Halves(questions)
        while part := halves.take():
            try:
                verdicts = await self._ask_until(part, again=halves.num_asked > 1)
            except (BadReward, ServersAway) as bad:
                if isinstance(bad, ServersAway) or not halves.split(part, bad.reason):
                    for question in part:
                        if not question.verdict.done():
                            question.verdict.set_exception(_same(bad))
                continue
            except Exception as defect:  # every waiting question has to receive the error
                fail(questions, defect)
                return
            halves.num_answered += 1
            for index, question in enumerate(part):
                if not question.verdict.done():
                    question.verdict.set_result(one_of(verdicts, index))

    async def _ask_until(self, questions: Sequence[Question], *, again: bool) -> Verdicts:
        """Return the answer of the first successful try; each try uses the server with the fewest requests.

        `again`: a part of a request that has failed, for which a failure that one sample may cause is final.
        """
        avoided, attempt, answers = "", 0, self._outage.answers
        while True:
            url = await self._server(avoided)
            try:
                return await self._ask_one(url, questions)
            except Transient as failure:
                outlasts = isinstance(failure, Unreached) and self._patience.away_s > 0
                if outlasts and self._outage.answers == answers:
                    continue
                attempt += 1
                if attempt > (0 if again and may_be_one(failure.bad.reason) else self.retries):
                    tries = f" ({attempt} tries)" if attempt > 1 else ""
                    raise BadReward(failure.bad.reason, f"{failure.bad}{tries}") from None
                avoided, answers = url, self._outage.answers
                if not outlasts:
                    asked_s = min(failure.asked_s, self._patience.away_s)
                    await asyncio.sleep(pause_s(self.backoff_s, attempt, asked_s))

    async def _server(self, avoided: str) -> str:
        """Wait until a server may be asked, and return the one for the next try. Raises ServersAway."""
        while not (urls := self._outage.candidates()):
            if self._outage.is_over():
                raise self._outage.error()
            await asyncio.sleep(self._outage.wait_s())
        # The server that just failed counts as one request busier, so that a retry prefers another one.
        return min(urls, key=lambda url: (self._busy[url] + (url == avoided), self.urls.index(url)))

    async def _ask_one(self, url: str, questions: Sequence[Question]) -> Verdicts:
        """Make one try. Raises Transient, or BadReward for a failure that every try would have."""
        import aiohttp

        self._busy[url] += 1
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self._open(url).post(url, data=self._body(questions), headers=JSON) as answer,
            ):
                status, text = answer.status, await answer.text(errors="replace")
                asked_s = retry_after_s(answer.headers.get("Retry-After"))
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
                raise Transient(BadReward("reward_timed_out", f"{url} took more than {self.timeout_s} s")) from None
            told = str(error) or type(error).__name__
            bad = BadReward("reward_unreachable", f"{url} cannot be reached{_by_proxy(url)}: {told}")
            raise self._unreached(url, bad) if _is_away(error) else Transient(bad) from None
        finally:
            self._busy[url] -= 1
        if status in AWAY:
            bad = BadReward(f"reward_http_{status}", f"{url} answered {status}: {_short(text)}")
            raise self._unreached(url, bad, asked_s)
        self._outage.answered(url)
        return _verdicts(url, status, text, len(questions), asked_s)

    def _unreached(self, url: str, bad: BadReward, asked_s: float = 0.0) -> Transient:
        """The failure of a try that did not reach `url`. Raises ServersAway if all servers have been away for too
        long."""
        if self._patience.away_s > 0:
            self._outage.failed(url, str(bad), asked_s)
            if self._outage.is_over():
                raise self._outage.error()
        return Unreached(bad, asked_s=asked_s)

    def _body(self, questions: Sequence[Question]) -> bytes:
        return body_of_openrlhf(questions) if self.of_openrlhf else _body(questions)

    def _open(self, url: str) -> aiohttp.ClientSession:
        if url not in self._sessions:
            import aiohttp

            connect_s = min(CONNECT_S, self.timeout_s / 2)
            limits = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
            self._sessions[url] = open_session(url, timeout=limits)
        return self._sessions[url]


JSON = {"Content-Type": "application/json"}


def body_of_openrlhf(questions: Sequence[Question]) -> bytes:
    """The body of a request with our fields and those of OpenRLHF."""
    ours = json.loads(_body(questions))
    query = [question.prompt + question.response for question in questions]
    labels = [label_of(question.columns) for question in questions]
    return json.dumps({**ours, "query": query, "labels": labels}, default=str).encode()


def _body(questions: Sequence[Question]) -> bytes:
    names = dict.fromkeys(name for question in questions for name in question.columns)
    body = {
        "prompts": [question.prompt for question in questions],
        "responses": [question.response for question in questions],
        "columns": {name: [question.columns.get(name) for question in questions] for name in names},
    }
    return json.dumps(body, default=str).encode()


def _by_proxy(url: str) -> str:
    proxy = proxy_of(url)
    return f" through the proxy {shown_proxy(proxy)}" if proxy else ""


def _same(bad: BadReward | ServersAway) -> BadReward | ServersAway:
    """The same failure for another question: an exception that is raised twice collects tracebacks."""
    return BadReward(bad.reason, str(bad)) if isinstance(bad, BadReward) else ServersAway(str(bad))


def _is_away(error: Exception) -> bool:
    """Whether a connection failed because no server is running at the other end, and not because the address is
    wrong."""
    import aiohttp

    if isinstance(error, aiohttp.ClientSSLError):
        return False
    return isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | ConnectionError)


def _verdicts(url: str, status: int, text: str, num: int, asked_s: float = 0.0) -> Verdicts:
    """The server's answer, checked like a function's answer."""
    if status in TRANSIENT:
        bad = BadReward(f"reward_http_{status}", f"{url} answered {status}: {_short(text)}")
        raise Transient(bad, asked_s=asked_s)
    if status == 422:  # from flowrl's own server: its function gave no verdict
        raise BadReward("reward_raised", f"{url} has no verdict: {_error(text)}")
    if status != 200:
        raise BadReward(f"reward_http_{status}", f"{url} answered {status}: {_short(text)}")
    try:
        answer = json.loads(text)
    except ValueError:
        raise Transient(BadReward("reward_malformed", f"{url} answered with invalid JSON: {_short(text)}")) from None
    if isinstance(answer, dict) and "extra_logs" in answer:
        answer = openrlhf_answer(answer, num)
    return _with_heads(url, as_verdicts(url, answer, num), answer)


def _with_heads(url: str, verdicts: Verdicts, answer: Any) -> Verdicts:
    """`verdicts` with the heads that a server's answer names. Raises BadReward for a head that is not in its logs."""
    heads = answer.get("heads") if isinstance(answer, Mapping) and "rewards" in answer else None
    if not heads:
        return verdicts
    known = isinstance(heads, Mapping) and all(name in verdicts.logs for name in heads)
    if not known or not all(isinstance(weight, int | float) and is_finite(weight) for weight in heads.values()):
        raise BadReward(
            "reward_malformed",
            f"{url} answered heads = {_short(str(heads))}; it needs a weight under names of its logs",
        )
    return replace(verdicts, heads={name: float(weight) for name, weight in heads.items()})


def _error(text: str) -> str:
    """What flowrl's own server says is wrong, else the beginning of the answer."""
    try:
        said = json.loads(text)["error"]
    except (ValueError, TypeError, KeyError):
        return _short(text)
    return str(said)[:LONGEST_ERROR]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 80 else f"{line[:77]}...")

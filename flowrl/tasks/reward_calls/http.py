"""Rewards over HTTP, both ends: the client that a run asks, and the server of `flowrl serve-reward`.

POST  {"prompts": [...], "responses": [...], "columns": {name: [...]}}; `columns` holds the rows' other columns and,
      under `messages`, the conversation before the response if it is known
200   the same as from a reward function: a list of numbers or {"rewards": [...], "scores": [...], "logs": {name:
      [...]}}. `heads`, if present, maps names of `logs` to weights, and the weighted sum of those logs is the reward:
      then --task.reward-weights can change the weights; {} if it is no such sum
400   for an invalid request, 422 if the function behind it has no verdict
GET /health  {"serving": name, "answered": number of samples}

A server of OpenRLHF's kind gets `query` (prompts with responses) and `labels` as well, and may answer `extra_logs`.

Waiting questions are sent together to the least busy server; while a server works on its requests, further questions
accumulate and form the next request.

Waits: a question waits for its answer, at most until `retries` further tries of `timeout_s` each have failed. A try
that reaches no server does not count, unless servers answer other requests meanwhile: it is repeated until the outage
ends, with an answer or with ServersAway.

Outages. A server is away from the time that it cannot be reached (`Outage.note_failure`) until it gives any answer
(`Outage.note_answer`). While another server can be reached, an away server is asked only after its pause is over. While
all are away, nothing is asked until the first pause is over. Such an outage ends with an answer, or `away_s` after the
last server went away. Pauses double from one failure to the next and are shortened at random, so that clients do not
return at the same moment.

Halves. A request for several samples that fails for a reason that one of them may have caused is asked again in halves,
until the samples that fail are alone:
- Only a failure that one sample may cause is asked again: an answer without a verdict for each (also 422 and 413), 500
  after its tries, and any 4xx that is not about the server, the client's rights or its rate (`OF_SERVERS`).
- A request for n samples is followed by at most 2n - 2 others, one after the other in its place. For them such a
  failure is final at the first try. After 4xx and 500, nothing is divided further when `UNANSWERED` requests have been
  made and none was answered: then it is the server.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from flowrl.errors import FlowrlError
from flowrl.machine.proxies import open_session, proxy_of, shown_proxy
from flowrl.tasks.reward_calls.judge import (
    BadReward,
    Question,
    RowColumns,
    Verdicts,
    as_verdicts,
    fail_questions,
    is_finite,
    join_verdicts,
)
from flowrl.tasks.reward_calls.signatures import label_of, openrlhf_answer

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

    from flowrl.tasks.reward_calls.reward_client import RewardClient

RETRIES = 4
CONNECT_S = 5.0
"""A server that has not accepted a connection in this time, or in half of `timeout_s` if that is less, is
unreachable."""
LONGEST_ERROR = 400
HTTP_BATCH = 32
"""Maximum number of samples in one request."""
REQUESTS_PER_URL = 2
LARGEST_REQUEST_BYTES = 256 << 20
JSON = {"Content-Type": "application/json"}

TRANSIENT = frozenset({408, 425, 429, 500})
AWAY = frozenset({502, 503, 504})
"""The answers of a proxy whose server cannot be reached, or of a server that is not ready."""
OF_SAMPLES = frozenset(
    {"reward_malformed", "reward_not_finite", "reward_wrong_length", "reward_raised", "reward_http_413"}
    | {"reward_unrendered"}
)
OF_SERVERS = frozenset({401, 402, 403, 404, 405, 406, 407, 408, 410, 415, 421, 425, 426, 429, 431, 451})
UNANSWERED = 10
"""As many requests as find one sample of 32: five times two halves."""

AWAY_S = 600.0
BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 8.0
TOLD_AFTER_S = 1.0
"""Shorter outages are not reported."""


# Servers that cannot be reached


class ServersAway(FlowrlError):
    """No server of a reward could be reached for as long as a run waits."""


def pause_s(backoff_s: float, failures: int, asked_s: float = 0.0) -> float:
    """Seconds to pause after `failures` failures in a row (from 1); at least `asked_s`, which the server asked for."""
    longest = min(backoff_s * 2.0 ** min(failures - 1, 16), LONGEST_BACKOFF_S)
    return max(longest * random.uniform(0.5, 1.0), asked_s)


def retry_after_s(header: str | None) -> float:
    """The seconds that a Retry-After header asks for, as a number or a date; 0 if there is none that can be read."""
    if not header:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        until = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


@dataclass(frozen=True)
class Patience:
    """How long to wait for servers that cannot be reached, and how the wait is reported."""

    away_s: float = AWAY_S
    """0: a request that reaches no server fails after its tries, like any other."""
    outside: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
    """Entered by every request that waits for an answer while no server can be reached; like `context.outside`."""
    report: Callable[[str], None] = lambda text: None
    """Called with one line when the last server has gone away, and with another when a server is back."""


PATIENT = Patience()


@dataclass
class _Server:
    failures: int = 0
    retry_at: float = 0.0


@dataclass
class Outage:
    """What is known about the servers `urls`. Times are of the monotonic clock."""

    urls: Sequence[str]
    patience: Patience
    backoff_s: float = BACKOFF_S
    answers: int = 0
    """Number of answers of all servers, from which a request can tell whether others get answers while it fails."""
    since: float | None = None
    """When the last server went away; None while at least one can be reached."""
    why: str = ""
    """The last failure."""
    _servers: dict[str, _Server] = field(init=False)
    _reported: bool = field(init=False, default=False)
    _changed: asyncio.Future[None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._servers = {url: _Server() for url in self.urls}
        self.what = f"the reward server {', '.join(self.urls)}"
        """What is waited for."""

    def next_change(self) -> asyncio.Future[None]:
        """Done when `since` becomes None, or stops being None."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed

    def servers_to_ask(self) -> list[str]:
        """The servers that may be asked now; [] while all pause."""
        now = time.monotonic()
        return [url for url, server in self._servers.items() if server.retry_at <= now]

    def wait_s(self) -> float:
        """Seconds until a server may be asked, or until the outage ends the run."""
        now = time.monotonic()
        first = min(server.retry_at for server in self._servers.values()) - now
        left = first if self.since is None else self.since + self.patience.away_s - now
        return max(0.0, min(first, left))

    def require_hope(self) -> None:
        """Raise ServersAway, which ends the run, if all servers have been away for `away_s`."""
        if self.since is not None and time.monotonic() >= self.since + self.patience.away_s:
            raise ServersAway(
                f"{self.what} could not be reached for {self.patience.away_s:g} s: {self.why}; start it again and go "
                "on with --resume, or set --reward-away-s higher"
            )

    def note_answer(self, url: str) -> None:
        """`url` has given an answer of any kind."""
        self.answers += 1
        self._servers[url] = _Server()
        if self.since is None:
            return
        if self._reported:
            self.patience.report(f"{self.what} answers again after {time.monotonic() - self.since:.0f} s")
        self.since, self._reported = None, False
        self._tell_change()

    def note_failure(self, url: str, why: str, asked_s: float = 0.0) -> None:
        """`url` could not be reached; it asks for a pause of `asked_s`."""
        server, now = self._servers[url], time.monotonic()
        if server.retry_at <= now:  # requests that fail together count as one failure
            server.failures += 1
        server.retry_at = max(server.retry_at, now + pause_s(self.backoff_s, server.failures, asked_s))
        if self.since is None and all(one.failures for one in self._servers.values()):
            self.since = now
            self._tell_change()
        self.why = why
        if self.since is not None and not self._reported and now - self.since >= TOLD_AFTER_S:
            self._reported = True
            self.patience.report(f"waits for {self.what}: {why}; it is tried again for {self.patience.away_s:g} s")

    def _tell_change(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


# The client


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
        batch: int = HTTP_BATCH,
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
        questions = Question.make_all(prompts, responses, columns)
        self._waiting += questions
        self._send_requests()
        pending = {question.verdict for question in questions}
        try:
            while pending:
                outage = self._outage
                with nullcontext() if outage.since is None else self._patience.outside(outage.what):
                    waited: set[asyncio.Future[Any]] = {*pending, outage.next_change()}
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                pending = {verdict for verdict in pending if not verdict.done()}
        finally:
            for question in questions:
                question.give_up()
        return join_verdicts([question.verdict.result() for question in questions])

    async def close(self) -> None:
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        for session in self._sessions.values():
            await session.close()

    def _send_requests(self) -> None:
        """Send requests for the waiting questions, as many as the servers may have."""
        self._waiting = [question for question in self._waiting if not question.verdict.done()]
        while self._waiting and len(self._requests) < self.per_url * len(self.urls):
            questions, self._waiting = self._waiting[: self.batch], self._waiting[self.batch :]
            request = asyncio.get_running_loop().create_task(self._answer_questions(questions))
            self._requests.add(request)
            request.add_done_callback(self._end_request)

    def _end_request(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        if not request.cancelled():
            request.result()
            self._send_requests()

    async def _answer_questions(self, questions: Sequence[Question]) -> None:
        """Set verdicts for all questions. A problem with one sample does not affect the others."""
        parts: list[Sequence[Question]] = [questions]
        num_asked = num_answered = 0
        while parts:
            part = [question for question in parts.pop() if not question.verdict.done()]
            if not part:
                continue
            num_asked += 1
            try:
                verdicts = await self._ask_until(part, again=num_asked > 1)
            except BadReward as bad:
                is_servers = bad.reason not in OF_SAMPLES and not num_answered and num_asked > UNANSWERED
                if len(part) > 1 and may_be_one_sample(bad.reason) and not is_servers:
                    middle = len(part) // 2
                    parts += [part[middle:], part[:middle]]
                else:
                    fail_questions(part, lambda bad=bad: BadReward(bad.reason, str(bad)))  # type: ignore[misc]
            except ServersAway as away:
                fail_questions(part, lambda away=away: ServersAway(str(away)))  # type: ignore[misc]
            except Exception as defect:  # every waiting question has to receive the error
                fail_questions(questions, lambda defect=defect: defect)  # type: ignore[misc]
                return
            else:
                num_answered += 1
                for index, question in enumerate(part):
                    question.answer(verdicts.of_sample(index))

    async def _ask_until(self, questions: Sequence[Question], *, again: bool) -> Verdicts:
        """Return the answer of the first successful try; each try uses the server with the fewest requests.

        `again`: a part of a request that has failed, for which a failure that one sample may cause is final.
        """
        avoided, attempt, answers = "", 0, self._outage.answers
        while True:
            while not (urls := self._outage.servers_to_ask()):
                self._outage.require_hope()
                await asyncio.sleep(self._outage.wait_s())
            # The server that just failed counts as one request busier, so that a retry prefers another one.
            url = min(urls, key=lambda url: (self._busy[url] + (url == avoided), self.urls.index(url)))
            try:
                return await self._ask_server(url, questions)
            except Transient as failure:
                outlasts = isinstance(failure, Unreached) and self._patience.away_s > 0
                if outlasts and self._outage.answers == answers:
                    continue
                attempt += 1
                if attempt > (0 if again and may_be_one_sample(failure.bad.reason) else self.retries):
                    tries = f" ({attempt} tries)" if attempt > 1 else ""
                    raise BadReward(failure.bad.reason, f"{failure.bad}{tries}") from None
                avoided, answers = url, self._outage.answers
                if not outlasts:
                    asked_s = min(failure.asked_s, self._patience.away_s)
                    await asyncio.sleep(pause_s(self.backoff_s, attempt, asked_s))

    async def _ask_server(self, url: str, questions: Sequence[Question]) -> Verdicts:
        """Make one try. Raises Transient, or BadReward for a failure that every try would have."""
        import aiohttp

        if url not in self._sessions:
            connect_s = min(CONNECT_S, self.timeout_s / 2)
            self._sessions[url] = open_session(url, timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s))
        body = request_body(questions, of_openrlhf=self.of_openrlhf)
        self._busy[url] += 1
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self._sessions[url].post(url, data=body, headers=JSON) as answer,
            ):
                status, text = answer.status, await answer.text(errors="replace")
                asked_s = retry_after_s(answer.headers.get("Retry-After"))
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
                raise Transient(BadReward("reward_timed_out", f"{url} took more than {self.timeout_s} s")) from None
            proxy = proxy_of(url)
            by_proxy = f" through the proxy {shown_proxy(proxy)}" if proxy else ""
            told = str(error) or type(error).__name__
            bad = BadReward("reward_unreachable", f"{url} cannot be reached{by_proxy}: {told}")
            # With these errors no server is running at the other end; with others the address is wrong.
            away = isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | ConnectionError)
            is_away = away and not isinstance(error, aiohttp.ClientSSLError)
            raise self._note_unreached(url, bad) if is_away else Transient(bad) from None
        finally:
            self._busy[url] -= 1
        if status in AWAY:
            bad = BadReward(f"reward_http_{status}", f"{url} answered {status}: {_shorten_text(text)}")
            raise self._note_unreached(url, bad, asked_s)
        self._outage.note_answer(url)
        return read_answer(url, status, text, len(questions), asked_s)

    def _note_unreached(self, url: str, bad: BadReward, asked_s: float = 0.0) -> Transient:
        """The failure of a try that did not reach `url`. Raises ServersAway if all servers have been away for too
        long."""
        if self._patience.away_s > 0:
            self._outage.note_failure(url, str(bad), asked_s)
            self._outage.require_hope()
        return Unreached(bad, asked_s=asked_s)


def may_be_one_sample(reason: str) -> bool:
    """Whether one sample may cause the failure of a whole request."""
    status = reason.removeprefix("reward_http_")
    if reason in OF_SAMPLES or status == reason:
        return reason in OF_SAMPLES
    return int(status) == 500 or (400 <= int(status) < 500 and int(status) not in OF_SERVERS)


def request_body(questions: Sequence[Question], *, of_openrlhf: bool) -> bytes:
    """The body of a request with our fields and, if asked for, those of OpenRLHF."""
    names = dict.fromkeys(name for question in questions for name in question.columns)
    body: dict[str, Any] = {
        "prompts": [question.prompt for question in questions],
        "responses": [question.response for question in questions],
        "columns": {name: [question.columns.get(name) for question in questions] for name in names},
    }
    if of_openrlhf:
        body["query"] = [question.prompt + question.response for question in questions]
        body["labels"] = [label_of(question.columns) for question in questions]
    return json.dumps(body, default=str).encode()


def read_answer(url: str, status: int, text: str, num: int, asked_s: float = 0.0) -> Verdicts:
    """The server's answer, checked like a function's answer. Raises Transient and BadReward."""
    if status in TRANSIENT:
        bad = BadReward(f"reward_http_{status}", f"{url} answered {status}: {_shorten_text(text)}")
        raise Transient(bad, asked_s=asked_s)
    if status == 422:  # from flowrl's own server, which says why: its function gave no verdict
        try:
            said = str(json.loads(text)["error"])[:LONGEST_ERROR]
        except (ValueError, TypeError, KeyError):
            said = _shorten_text(text)
        raise BadReward("reward_raised", f"{url} has no verdict: {said}")
    if status != 200:
        raise BadReward(f"reward_http_{status}", f"{url} answered {status}: {_shorten_text(text)}")
    try:
        answer = json.loads(text)
    except ValueError:
        raise Transient(
            BadReward("reward_malformed", f"{url} answered with invalid JSON: {_shorten_text(text)}")
        ) from None
    if isinstance(answer, dict) and "extra_logs" in answer:
        answer = openrlhf_answer(answer, num)
    verdicts = as_verdicts(url, answer, num)
    heads = answer.get("heads") if isinstance(answer, Mapping) and "rewards" in answer else None
    if not heads:
        return verdicts
    known = isinstance(heads, Mapping) and all(name in verdicts.logs for name in heads)
    if not known or not all(isinstance(weight, int | float) and is_finite(weight) for weight in heads.values()):
        raise BadReward(
            "reward_malformed",
            f"{url} answered heads = {_shorten_text(str(heads))}; it needs a weight under names of its logs",
        )
    return replace(verdicts, heads={name: float(weight) for name, weight in heads.items()})


def _shorten_text(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 80 else f"{line[:77]}...")


# The server


class BadRequest(Exception):
    """An invalid request; the text states what is missing."""


class RewardServer:
    """Answers requests with the verdicts of `client`."""

    def __init__(self, name: str, client: RewardClient) -> None:
        self.name = name
        self._client = client
        self._answered = 0

    def make_app(self) -> web.Application:
        """The aiohttp application; it closes the client when it ends."""
        from aiohttp import web

        async def close(app: web.Application) -> None:
            await self._client.close()

        app = web.Application(client_max_size=LARGEST_REQUEST_BYTES)
        app.add_routes([web.post("/score", self._answer_score), web.get("/health", self._answer_health)])
        app.on_cleanup.append(close)
        return app

    async def _answer_score(self, request: web.Request) -> web.Response:
        from aiohttp import web

        try:
            prompts, responses, columns = _read_request(await request.text())
        except BadRequest as bad:
            return web.json_response({"error": str(bad)}, status=400)
        try:
            verdicts = await self._client.ask(prompts, responses, columns)
        except BadReward as bad:
            return web.json_response({"error": str(bad), "reason": bad.reason}, status=422)
        self._answered += len(prompts)
        logs, heads = dict(verdicts.logs), dict(verdicts.heads)
        return web.json_response({"rewards": verdicts.rewards, "scores": verdicts.scores, "logs": logs, "heads": heads})

    async def _answer_health(self, request: web.Request) -> web.Response:
        from aiohttp import web

        return web.json_response({"serving": self.name, "answered": self._answered})


def _read_request(text: str) -> tuple[Sequence[str], Sequence[str], RowColumns]:
    """(prompts, responses, columns of each sample) of a request's body. Raises BadRequest."""
    try:
        body = json.loads(text)
    except ValueError as problem:
        raise BadRequest(f"the body is not valid JSON ({problem})") from None
    if not isinstance(body, Mapping):
        raise BadRequest(f"the body is a {type(body).__name__}; it needs an object with prompts and responses")
    for name in ("prompts", "responses"):
        values = body.get(name)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise BadRequest(f"{name} is {str(values)[:60]!r}; it needs a list of texts")
    prompts, responses, columns = body["prompts"], body["responses"], body.get("columns", {})
    if not isinstance(columns, Mapping):
        raise BadRequest("columns is not an object; it needs a list for each name")
    for name, values in {"responses": responses, **columns}.items():
        length = len(values) if isinstance(values, list) else -1
        if length != len(prompts):
            raise BadRequest(f"there are {len(prompts)} prompts, but {length} of {name}")
    return prompts, responses, [{name: columns[name][i] for name in columns} for i in range(len(prompts))]

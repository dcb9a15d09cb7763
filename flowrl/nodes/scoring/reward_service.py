"""`flowrl serve-reward` serves a trained reward model or a function at an address that graphs name as their reward."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from flowrl.errors import ConfigError
from flowrl.models import Policy, check_model, resolve
from flowrl.models.tokens.chat import Unrendered
from flowrl.models.tokens.text_tokens import separator_of, split_steps, step_tokens
from flowrl.nodes.scoring.reward_model import OfSteps, reward_of_steps
from flowrl.runtime.telemetry.standard_streams import print_text
from flowrl.tasks.reward_calls.http import Patience, RewardServer
from flowrl.tasks.reward_calls.judge import BadReward, RowColumns, Verdicts
from flowrl.tasks.reward_calls.reward_client import RewardClient
from flowrl.tasks.rewards import check_reward, open_reward, parse_reward
from flowrl.tasks.task_syntax import parse_weights

if TYPE_CHECKING:
    from flowrl.models.scorer import Scorer


A = TypeVar("A")
T = TypeVar("T")


@dataclass(frozen=True)
class ServeOptions:
    """Options of `flowrl serve-reward`."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for other machines."""
    port: int = 8100
    """Port to listen at; 0 takes a free port."""
    device: str = "cpu"
    """Device of the model: cpu, cuda, cuda:1."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the model."""
    trust_remote_code: bool = False
    """Run the Python files that come with the model."""
    timeout_s: float = 10.0
    """A function that takes longer for a request is killed."""
    workers: int = 1
    """Number of processes for a synchronous function."""
    weights: str = ""
    """Weights of the values of a function that returns several values, such as correct=1,format=0.2; values that are
    not named have weight 1."""
    label: str = ""
    """For a model with several labels: the label that is the score, by name or number; or a weighted sum of labels,
    such as helpfulness=0.8,verbosity=-0.2. The answer has the scores of all labels."""

    step_separator: str = ""
    """The text that ends a step, for a process reward model, such as '\\n'; empty: responses are scored as a whole."""
    of_steps: OfSteps = "min"
    """How a response's reward is computed from the scores of its steps."""

    def __post_init__(self) -> None:
        if self.of_steps != "min" and not self.step_separator:
            raise ConfigError("--of-steps: responses are scored as a whole; give --step-separator too, or leave it out")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port is {self.port}; it has to be in 0 to 65535")
        if self.timeout_s <= 0:
            raise ConfigError(f"--timeout-s is {self.timeout_s}; it has to be above 0")
        if self.workers < 1:
            raise ConfigError(f"--workers is {self.workers}; it needs at least 1")
        _ = self.head_weights

    @property
    def head_weights(self) -> Mapping[str, float]:
        """The weights of a function's values by name. Raises ConfigError if one is no number."""
        return parse_weights("--weights", self.weights)


class AskModel:
    """Scores with a reward model, one request at a time, off the event loop.

    With a `separator` the model is a process reward model: the steps of a response are scored, and the logs have their
    number.
    """

    def __init__(self, scorer: Scorer, *, separator: str = "", of_steps: OfSteps = "min") -> None:
        self._scorer = scorer
        self._separator = separator_of(separator) if separator else ""
        self._of_steps: OfSteps = of_steps
        self._exclusive = asyncio.Lock()

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> Verdicts:
        # The turns of a prompt are the `messages` of its row, if it has them.
        turns = [
            row.get("messages") or [{"role": "user", "content": prompt}]
            for prompt, row in zip(prompts, columns, strict=True)
        ]
        asked = [*zip(turns, responses, strict=True)]
        try:
            if self._separator:
                chat, mark = self._scorer.chat, self._separator
                tokens = [step_tokens(chat, before, split_steps(response, mark), mark) for before, response in asked]
                async with self._exclusive:
                    steps = await asyncio.to_thread(self._scorer.step_scores, tokens)
                rewards = tuple(reward_of_steps(scores, self._of_steps) for scores in steps)
                return Verdicts(rewards, rewards, {"steps": tuple(float(len(scores)) for scores in steps)})
            async with self._exclusive:
                found = await asyncio.to_thread(self._scorer.score_labels, asked)
        except Unrendered as problem:
            raise BadReward("reward_unrendered", f"a response cannot be scored: {problem}") from problem
        scores = tuple(map(self._scorer.sum_labels, found))
        if len(self._scorer.labels) == 1:
            return Verdicts(scores, scores)
        logs = {name: tuple(of[n] for of in found) for n, name in enumerate(self._scorer.labels)}
        return Verdicts(scores, scores, logs, self._scorer.labels)

    async def close(self) -> None: ...


class WeighedAnswers:
    """Weighs the values of a function's answers; a weight for a value that the function does not return is an error."""

    def __init__(self, what: str, client: RewardClient, weights: Mapping[str, float]) -> None:
        self._what = what
        self._client = client
        self._weights = weights
        self._known: set[str] = set()

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> Verdicts:
        verdicts = await self._client.ask(prompts, responses, columns)
        self._known |= verdicts.heads.keys()
        if strange := [name for name in self._weights if name not in self._known]:
            values = f"the values {', '.join(sorted(self._known))}" if self._known else "one value without a name"
            raise BadReward("reward_weights", f"--weights names {strange[0]}, but {self._what} returns {values}")
        return verdicts.weighted(self._weights)

    async def close(self) -> None:
        await self._client.close()


def serve_until_interrupted(what: str, options: ServeOptions) -> None:
    """Serve until interrupted. Raises ConfigError if the model or function does not load, or the port is in use."""
    asyncio.run(_serve_requests(RewardServer(what, open_scorer(what, options)), options))


def open_scorer(what: str, options: ServeOptions) -> RewardClient:
    """What answers the requests: a reward model, or a function. Raises ConfigError."""
    model = Policy(what, trust_remote_code=options.trust_remote_code)
    if model.path.is_dir() or (model.hub_name is not None and ":" not in what):
        from flowrl.models.scorer import check_reward_model, load_scorer

        check_model(model)
        path = resolve(model)
        if options.weights:
            raise ConfigError("--weights is for the values of a function; the labels of a model are weighed by --label")
        trusted, label = model.trust_remote_code, options.label
        check_reward_model(path, trust_remote_code=trusted, label=label, option="--label")
        scorer = load_scorer(path, options.device, options.dtype, trust_remote_code=trusted, label=label)
        return AskModel(scorer, separator=options.step_separator, of_steps=options.of_steps)
    if ":" not in what and not what.endswith(".py"):
        raise ConfigError(
            f"{what!r} is neither a directory of a reward model, nor a name on the Hub, nor a function; name one "
            "that the graph reward_model has saved, OWNER/NAME, or FILE.py:FUNCTION"
        )
    if options.step_separator:
        raise ConfigError("--step-separator is for a process reward model; a function divides responses itself")
    if options.label:
        raise ConfigError("--label is for a reward model; the values of a function are weighed by --weights")
    parts = parse_reward(what)
    check_reward(parts, ())
    impatient = Patience(away_s=0.0)  # the clients of this server wait and try again
    client = open_reward(parts, timeout_s=options.timeout_s, concurrency=options.workers, patience=impatient)
    return WeighedAnswers(what, client, options.head_weights) if options.weights else client


async def _serve_requests(server: RewardServer, options: ServeOptions) -> None:
    from aiohttp import web

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(server.make_app())
    await runner.setup()
    try:
        await web.TCPSite(runner, options.host, options.port).start()
        port = runner.addresses[0][1]
        print_text(f"flowrl: {server.name} answers at http://{options.host}:{port}/score", flush=True)
        await stop.wait()
    except OSError as problem:
        raise ConfigError(f"port {options.port} of {options.host} cannot be served: {problem.strerror}") from None
    finally:
        await runner.cleanup()

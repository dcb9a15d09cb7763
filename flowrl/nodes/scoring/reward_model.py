"""The reward model as a node: a trained scalar head replaces a reward function.

If the reward model has the policy's tokenizer and template, it scores a sample's own token ids;
otherwise the response text is rendered again after the turns of its row. A process reward model scores every step of a
response, and the reward is computed from these scores.

If the task's reward is a sum that names `reward_model`, the functions of the sum are asked as well.

One pass of the model takes up to `batch` samples (`SharedPass`). Held-out answers are scored by the same model when no
sample waits: they take no tickets and are not in the ledger.

`run` ends when every sample is scored and every caller has closed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from flowrl.errors import ConfigError, SampleFailed
from flowrl.graph.node import Facts
from flowrl.graph.ports import In, Out, Serve
from flowrl.messages import Bool, Int32, Message, Sample, Scored
from flowrl.models import Policy, check_model, resolve, tokenizer_of
from flowrl.models.tokens.chat import Unrendered
from flowrl.models.tokens.text_tokens import separator_of, split_steps, step_tokens
from flowrl.models.tokens.tool_form import uses_tools
from flowrl.nodes.scoring.reward import FailingRewards, RewardFunctions
from flowrl.nodes.scoring.scoring_model import ScoringNode, SharedPass
from flowrl.nodes.scoring.shaping import Shaping
from flowrl.tasks import KnownRows, Row, Task, parts_of
from flowrl.tasks.reward_calls.http import AWAY_S
from flowrl.tasks.reward_calls.judge import BadReward, Verdicts
from flowrl.tasks.rewards import MODEL, beside_model, named_parts
from flowrl.training.settings import Dtype, Layout

if TYPE_CHECKING:
    from flowrl.models.scorer import Scorer


NOT_FINITE = "the model's score is not a finite number"
TRIED_ROWS = 8
"""Number of rows that have to render identically before two templates count as equal."""


class RewardModel(ScoringNode):
    """Scores samples by the reward model in the directory `model`; `policy` and `task` are the generator's.

    With `normalise` the reward is the score minus the model's mean, divided by its standard deviation, both
    from its config.json; the raw reward is the unchanged score. At most `batch` samples wait for a pass, which takes
    at most `token_budget` tokens, padding included, or a single longer sample. `layout` says whether prefixes that
    samples share are computed once, see `ZeroSettings`. `label` says which of several labels are the score, see
    `flowrl.models.scorer.label_weights`; each label is logged as `reward_model/LABEL`. `timeout_s`, `concurrency` and
    `away_s` are for the functions and servers of a sum, as in `Reward`.

    `requests` serves the scores of held-out answers to the rows of any task with the same system prompt.
    """

    rollouts: In[Sample]
    scored: Out[Scored]
    requests: Serve[ScoreQuestion, ModelScore]

    def __init__(
        self,
        model: str,
        policy: Policy,
        task: Task,
        *,
        normalise: bool = False,
        shaping: Shaping | None = None,
        batch: int = 64,
        dtype: Dtype = "float32",
        token_budget: int = 8192,
        layout: Layout = "auto",
        label: str = "",
        timeout_s: float = 10.0,
        concurrency: int | None = None,
        away_s: float = AWAY_S,
    ) -> None:
        super().__init__(policy, dtype=dtype, token_budget=token_budget, layout=layout, batch=batch)
        self.model = model
        self.label = label
        self.task = task
        self.normalise = normalise
        self.shaping = shaping or Shaping()
        self.weight, others = beside_model(parts_of(task, task.verifier))
        self._functions: RewardFunctions | None = None
        if others:
            self._functions = RewardFunctions(task, others, timeout_s=timeout_s, processes=concurrency, away_s=away_s)
        self._failing = FailingRewards()
        self._scorer: Scorer
        self.reads_text = False
        """Whether the model reads the row and the response as text, not the sample's own tokens."""
        self._pass: SharedPass[Any, Sequence[float]] = SharedPass(self, "score", self._score_tokens)

    def facts(self) -> Facts:
        return Facts(drops=True, concurrency=self.batch, optional=("requests",))

    def check(self, facts: Any) -> list[str]:
        problems = self.shaping.find_problems()
        if self.model:
            return [*problems, *super().check(facts)]
        missing = "its model is empty; name the directory of a reward model, as graphs/reward_model.py makes"
        return [*problems, *self.number_problems(), missing]

    def preflight(self) -> str | None:
        from flowrl.models.scorer import check_reward_model

        if self.scored_by.built_in:
            raise ConfigError(
                f"{self.model} is no reward model; train one with graphs/reward_model.py and name it here"
            )
        check_model(self.scored_by)
        trusted = self.scored_by.trust_remote_code
        check_reward_model(resolve(self.scored_by), trust_remote_code=trusted, label=self.label)
        return None if self._functions is None else self._functions.preflight()

    @property
    def scored_by(self) -> Policy:
        """The reward model as a policy; its remote code is trusted if the policy's is."""
        return self.policy.with_model(self.model)

    async def setup(self) -> None:
        await super().setup()
        if self._functions is not None:
            await self.blocking(self._functions.open_client, self.context)

    async def close(self) -> None:
        await super().close()
        if self._functions is not None:
            await self._functions.close()

    def load_model(self) -> None:
        from flowrl.models.scorer import Scorer, labels_of, scorer_load
        from flowrl.models.tokens.chat import load_tokenizer

        trusted = self.scored_by.trust_remote_code
        path = resolve(self.scored_by, progress=self.context.progress)
        model = self.open_model(scorer_load(path, self.dtype, trust_remote_code=trusted, layout=self.layout))
        tokenizer = load_tokenizer(path, trust_remote_code=trusted)
        self._scorer = Scorer(
            model,
            tokenizer,
            labels=labels_of(path, self.label),
            system_prompt=self.task.system_prompt,
            token_budget=self.token_budget,
        )
        self._known = KnownRows(self.task)
        theirs = tokenizer_of(self.policy, progress=self.context.progress)
        some = [list(row.turns) for row in self._known.of_prompts(TRIED_ROWS) if not uses_tools(row.turns, ())]
        if not renders_alike(theirs, self._scorer.chat.tokenizer, some):
            self.reads_text = True
            self.context.progress("its tokenizer or template differs from the policy's: responses are rendered again")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self.requests.live is not None:
                tasks.create_task(self.requests.each(self._score_held_out, concurrency=self.batch))
            await self.rollouts.each(self._score_sample, concurrency=self.batch)
            self.scored.close()  # held-out answers may still come

    async def _score_sample(self, sample: Sample) -> None:
        try:
            score, more = await self.model_score(self.question_of(sample))
        except SampleFailed as failure:
            self._failing.note_failed(self.context, str(failure), f"{failure}: {failure.__cause__ or NOT_FINITE}")
            raise
        verdicts = None
        if self._functions is not None:
            try:
                verdicts = await self._functions.score_sample(sample)
            except BadReward as bad:
                self._failing.note_failed(self.context, bad.reason, str(bad))
                raise SampleFailed(bad.reason) from bad
        scored = self.scored_sample(sample, score, verdicts, more)
        self._failing.note_scored()
        await self.scored.send(scored)

    async def _score_held_out(self, asked: ScoreQuestion) -> ModelScore:
        score, more = await self.model_score(asked, later=True)
        return ModelScore(score, self.reward_of_score(score), more)

    def question_of(self, sample: Sample) -> ScoreQuestion:
        """The question to the model about a training sample."""
        if not self.reads_text:
            return score_question(sample, None)
        if (row := self._known.get(sample.prompt_id)) is None:
            raise ConfigError(
                f"task {self.task.name!r} has no row for the prompt {sample.prompt_text[:60]!r} of a sample"
            )
        return score_question(sample, row)

    async def model_score(self, asked: ScoreQuestion, *, later: bool = False) -> tuple[float, dict[str, float]]:
        """The model's score, and further parts to be logged. Raises SampleFailed if a score is not finite, or if the
        model's template does not render the response: what a policy samples ends no run."""
        try:
            tokens = self.read_tokens(asked)
        except Unrendered as problem:
            raise SampleFailed("reward_unrendered") from problem
        scores = await self._pass.ask_model(tokens, later=later)
        if not all(map(math.isfinite, scores)):
            raise SampleFailed("reward_not_finite")
        return self.sum_scores(scores)

    def read_tokens(self, asked: ScoreQuestion) -> Any:
        """What the model reads: the token ids of prompt and response."""
        if self.reads_text:
            return self._scorer.render_ids(asked.turns, asked.response, tools=asked.tools)
        return self._scorer.chat.close_response(asked.token_ids)

    def _score_tokens(self, asked: list[Any]) -> Sequence[Sequence[float]]:
        """The score of each label; blocking."""
        return self._scorer.label_scores(asked)

    def sum_scores(self, scores: Sequence[float]) -> tuple[float, dict[str, float]]:
        """The score of a response, and the parts that are logged."""
        more = {f"{MODEL}/{name}": score for name, score in self._scorer.by_name(scores).items()}
        return self._scorer.sum_labels(scores), more

    def reward_of_score(self, score: float) -> float:
        """The model's score as it enters a reward: normalised, or unchanged."""
        return self._scorer.normalise_scores([score])[0] if self.normalise else score

    def scored_sample(
        self, sample: Sample, score: float, beside: Verdicts | None = None, more: Mapping[str, float] | None = None
    ) -> Scored:
        """`sample` with the reward that is trained on, and the unchanged reward as the raw reward.

        `beside` has the verdicts of the functions of a sum, `more` has further parts to be logged.
        """
        reward = self.reward_of_score(score)
        summed, raw, parts = self.weight * reward, self.weight * score, {MODEL: score, **(more or {})}
        if beside is not None and self._functions is not None:
            summed, raw = summed + beside.rewards[0], raw + beside.scores[0]
            parts |= named_parts(self._functions.parts, beside)
        shaped = self.shaping.shape_reward(summed, parts, num_tokens=sample.response_tokens, truncated=sample.truncated)
        return Scored.of(sample, shaped, raw, **parts)


def renders_alike(policy: Any, reward_model: Any, conversations: list[list[Any]]) -> bool:
    """Whether two tokenizers give the same ids; the reward model's may have an additional pad token."""
    from flowrl.models import Chat

    known = reward_model.get_vocab()
    if any(known.get(token) != token_id for token, token_id in policy.get_vocab().items()):
        return False
    if (policy.chat_template, policy.eos_token_id) != (reward_model.chat_template, reward_model.eos_token_id):
        return False
    chats = Chat(policy), Chat(reward_model)
    rendered = ([chat.encode_completion(turns, "12 words")[0].tolist() for chat in chats] for turns in conversations)
    return all(ours == theirs for ours, theirs in rendered)


OfSteps = Literal["min", "mean", "product", "last"]
MOST_LOGGED = 32
"""Most steps of a response whose scores are logged."""


class ProcessReward(RewardModel):
    """Scores steps with a model that the graph process_reward_model trains; a score is σ of the model's output.

    For a model with several labels, `label` says how its output is computed from them; good=1,bad=-1 gives the softmax
    of two.

    `separator` ends a step, and `of_steps` says how a response's reward follows from the scores of its steps.
    `reward_parts` has the scores as `step_0`, `step_1` and so on, and their number as `steps`.
    """

    def __init__(
        self, model: str, policy: Policy, task: Task, *, separator: str, of_steps: OfSteps = "min", **options: Any
    ) -> None:
        super().__init__(model, policy, task, **options)
        self.separator = separator_of(separator)
        self.of_steps: OfSteps = of_steps
        self.reads_text = True

    def check(self, facts: Any) -> list[str]:
        problems = super().check(facts)
        if self.of_steps not in get_args(OfSteps):
            problems.append(f"of_steps is {self.of_steps!r}; choose one of {', '.join(get_args(OfSteps))}")
        if self.normalise:
            problems.append("normalise is set, but the scores of steps are probabilities; leave it out")
        return problems

    def read_tokens(self, asked: ScoreQuestion) -> tuple[Int32, Bool]:
        """The tokens that the model reads, and a mask of the positions with the steps' scores."""
        steps = split_steps(asked.response, self.separator)
        return step_tokens(self._scorer.chat.with_tools(asked.tools), asked.turns, steps, self.separator)

    def _score_tokens(self, asked: list[Any]) -> Sequence[Sequence[float]]:
        return self._scorer.step_scores(asked)

    def sum_scores(self, scores: Sequence[float]) -> tuple[float, dict[str, float]]:
        parts = {"steps": float(len(scores))} | {f"step_{n}": score for n, score in enumerate(scores[:MOST_LOGGED])}
        return reward_of_steps(scores, self.of_steps), parts


def reward_of_steps(scores: Sequence[float], of_steps: OfSteps) -> float:
    """The reward of a response whose steps have these scores."""
    found = {"min": min(scores), "mean": sum(scores) / len(scores), "product": math.prod(scores), "last": scores[-1]}
    return found[of_steps]


@dataclass(frozen=True)
class ScoreQuestion(Message):
    """A response, both as the tokens of its generator and as text that follows the turns of its row.

    Without the row, only a model that reads the generator's tokens can answer.
    """

    response: str
    token_ids: Int32
    """Prompt and response."""
    turns: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


def score_question(sample: Sample, row: Row | None) -> ScoreQuestion:
    """The question about `sample` and its row."""
    asked = ((), ()) if row is None else (row.turns, row.tools)
    return ScoreQuestion(sample.response_text, sample.token_ids, *asked)


@dataclass(frozen=True)
class ModelScore(Message):
    """The score of a response."""

    score: float
    """The score as the model gives it."""
    reward: float
    """The score as it enters a reward: normalised if the node normalises."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Scores of labels or steps by the names under which they are logged."""

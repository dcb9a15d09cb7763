"""A model's answers to prompts, without training: how many are right, and their mean score.

flowrl run evaluate --policy tiny --task arithmetic --prompts 512
flowrl run evaluate --policy runs/first/checkpoints/step_000060 --task test.jsonl:check=math
flowrl run evaluate --task prompts.jsonl --reward-model runs/reward_model/checkpoints/step_000300
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrl import Graph
from flowrl.nodes import Evaluation, Generator, PromptLimit, Sampling, TooLong
from flowrl.options import GeneratorOptions, GraphConfig, RewardOptions, TruncationOptions, too_low
from flowrl.tasks.evaluation_set import EvaluationSet
from flowrl.tasks.rewards import MODEL, names_model

OF_MADE_ROWS = 512
"""Number of held-out prompts to ask of a task that makes its rows."""


@dataclass(frozen=True)
class Evaluate(GraphConfig):
    learning = "samples"  # its answers are as long as those of training
    help_texts = {
        "policy": "tiny, smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub: the model that answers.",
        "task": "What is asked: all rows of a file, a dataset directory or a dataset of the Hub; the held-out rows of "
        "arithmetic and reasoning_gym/NAME. Options follow a colon.",
    }

    generator: GeneratorOptions = GeneratorOptions()
    truncation: TruncationOptions = TruncationOptions()
    reward: RewardOptions = RewardOptions()

    prompts: int | None = None
    """Maximum number of prompts to ask from each set; None: all, or 512 from a task that makes its rows."""
    evaluate_samples: int = 1
    """Number of answers to each prompt: a single one is greedy unless --temperature is given, several are sampled."""
    evaluate_task: tuple[str, ...] = ()
    """Ask all rows of these files or splits in place of --task: test.jsonl:check=math, or with a name and its own
    numbers gsm8k=test.jsonl:check=math,num=500,samples=4,temperature=0.6."""
    evaluate_also: tuple[str, ...] = ()
    """Further tasks, each scored by its own verifier."""
    evaluate_max_prompt_tokens: int | None = None
    """Maximum number of tokens in a prompt; None: what the model's context has room for."""
    too_long: TooLong = "drop"
    """Prompts over the limit are left out and counted, lose their beginning, or are an error."""
    max_tokens: int = 32
    """Maximum number of tokens in an answer."""
    temperature: float | None = None
    """Sampling temperature, 0 for greedy answers; None: 1, or 0 for a set with one answer to each prompt."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, prompts=1, evaluate_samples=1, max_tokens=1, evaluate_max_prompt_tokens=1)
        yield from too_low(self, temperature=0)
        names = [one.name for one in self.sets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"two sets are named {twice[0]}; give one another name with --evaluate-task, as in other=FILE"
        if same := [one for one in self.sets if one.asked_at == 0 and one.samples > 1]:
            yield (
                f"--temperature is {self.temperature}, and the {same[0].samples} answers to a prompt of {same[0].name} "
                "would be all equal; it has to be above 0"
            )
        if all(one.asked_at == 0 for one in self.sets):
            yield from self.truncation.untruncated_problems()
        if self.reward.reward_model.model and not any(names_model(one.task.reward) for one in self.sets):
            yield (
                "--reward-model scores nothing, for each set of --evaluate-task has a check or reward of its own; "
                "leave it out, or write reward=reward_model into a set"
            )

    @property
    def asks_functions(self) -> bool:
        return True  # where a reward model scores, the verifier is still asked about rows with answers

    @property
    def sets(self) -> tuple[EvaluationSet, ...]:
        """What is asked."""
        like = self.reward.held_out_task(self.data.task)
        found = [EvaluationSet.parse(text, like=like, samples=self.evaluate_samples) for text in self.evaluate_task]
        further = [replace(self.data.task, name=name, reward="") for name in self.evaluate_also]
        for task in (*(() if found else (like,)), *further):
            if task.made_sources:  # the held-out rows; of a task with files, all rows
                number = self.prompts or OF_MADE_ROWS
                found.append(EvaluationSet(task.name, task, num=number, samples=self.evaluate_samples))
            else:
                found.append(EvaluationSet(task.name, task, samples=self.evaluate_samples, whole=True))
        limited = (one if one.num is not None else replace(one, num=self.prompts, at_most=True) for one in found)
        return tuple(map(self._sampled, limited))

    def _sampled(self, one: EvaluationSet) -> EvaluationSet:
        """The set, with the sampling settings that it leaves to the command."""
        usual = self.temperature if self.temperature is not None else float(one.samples > 1)
        found = replace(one, temperature=usual if one.temperature is None else one.temperature)
        if found.asked_at == 0:
            return found
        top_p, top_k, usual_of = one.top_p, one.top_k, self.truncation
        return replace(
            found, top_p=usual_of.top_p if top_p is None else top_p, top_k=usual_of.top_k if top_k is None else top_k
        )


def graph(cfg: Evaluate) -> Graph:
    sampling = Sampling(max_tokens=cfg.max_tokens, stop=cfg.generator.stop_strings)

    g = Graph("evaluate")
    engine = cfg.generator.engine
    answers = Generator(cfg.model, sampling=sampling, engine=engine)
    generator = g.add("generator", answers, **cfg.place_generator())
    asked = Evaluation(
        (),
        cfg.model,
        sets=cfg.sets,
        prompt_limit=PromptLimit(cfg.evaluate_max_prompt_tokens, cfg.too_long, engine=engine.max_model_len),
        concurrency=engine.concurrency * cfg.generator.size.replicas,
        **cfg.reward.held_out_asking,
    )
    evaluation = g.add("evaluation", asked)

    g.call(evaluation.generate, generator.requests)
    size = cfg.reward.reward_model
    if asked.asks_model and size.model:
        task = replace(cfg.sets[0].task, reward=MODEL)  # the evaluation itself asks the functions of a sum
        reward = g.add("reward", cfg.reward.build_model(task, cfg.model, **size.given), **cfg.place(size))
        g.call(evaluation.score, reward.requests)
        g.ignore(reward.rollouts)
        g.ignore(reward.scored)
    g.ignore(generator.prompts)
    g.ignore(generator.rollouts)
    g.ignore(generator.weights)
    cfg.share_devices(g)
    return g

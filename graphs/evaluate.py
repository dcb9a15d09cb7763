"""A model's answers to held-out prompts, without training: how many are right, and their mean score.

flowrl run evaluate --policy tiny --task arithmetic --prompts 512
flowrl run evaluate --policy runs/first/checkpoints/step_000060 --sets test.jsonl:check=math
"""

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl import Graph
from flowrl.blocks import GeneratorOptions
from flowrl.nodes import Evaluation, Generator, Sampling
from flowrl.nodes.too_long import PromptLimit, TooLong
from flowrl.role_options import TimedReward, too_low
from flowrl.tasks.evaluation_set import EvaluationSet


@dataclass(frozen=True)
class Evaluate(TimedReward, GeneratorOptions):
    learning = "samples"  # its answers are as long as those of training

    policy: str = "tiny"
    """tiny, smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub: the model that answers."""
    prompts: int = 512
    """Held-out prompts of --task that are asked."""
    samples: int = 1
    """Answers to each prompt: one is greedy, several are sampled."""
    sets: tuple[str, ...] = ()
    """Ask all rows of these files or splits in place of --task: test.jsonl:check=math, or with a name and its own
    numbers gsm8k=test.jsonl:check=math,num=500,samples=4."""
    also: tuple[str, ...] = ()
    """Further tasks, each scored by its own verifier."""
    max_tokens: int = 32
    """Most tokens of an answer."""
    max_prompt_tokens: int | None = None
    """Most tokens of a prompt; None: what the model's context has room for."""
    too_long: TooLong = "drop"
    """Prompts over the limit are left out and counted, lose their beginning, or are an error."""
    temperature: float = 1.0
    """Sampling temperature of several answers."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, prompts=1, samples=1, max_tokens=1, max_prompt_tokens=1)
        yield from self.timeout_problems()
        if not self.temperature > 0:
            yield f"--temperature is {self.temperature}; it has to be above 0, or the answers to a prompt are all equal"


def graph(cfg: Evaluate) -> Graph:
    sampling = Sampling(temperature=cfg.temperature, max_tokens=cfg.max_tokens, stop=cfg.stop_strings)
    sets = tuple(EvaluationSet.parse(text, like=cfg.task, samples=cfg.samples) for text in cfg.sets)
    several = cfg.samples > 1 or any(one.samples > 1 for one in sets)

    g = Graph("evaluate")
    answers = Generator(cfg.model, sampling=sampling, evaluation=sampling if several else None, engine=cfg.engine)
    generator = g.add("generator", answers, **cfg.place_generator())
    held_out = Evaluation(
        () if sets else cfg.task,
        cfg.model,
        num_prompts=cfg.prompts,
        num_samples=cfg.samples,
        also=cfg.also,
        sets=sets,
        prompt_limit=PromptLimit(cfg.max_prompt_tokens, cfg.too_long, option="max_prompt_tokens"),
        concurrency=cfg.engine.concurrency * cfg.generator.replicas,
        **cfg.timed,
    )
    evaluation = g.add("evaluation", held_out)

    g.call(evaluation.generate, generator.requests)
    g.ignore(generator.prompts)
    g.ignore(generator.rollouts)
    g.ignore(generator.weights)
    cfg.take_turns(g)
    return g

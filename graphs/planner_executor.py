"""Two policies on one prompt: a planner writes a hint, an executor reads hint and question and answers.

The plan is the planner's sample; each answer to it is derived from the plan, and is the executor's sample. Both are
trained by GRPO, each policy with its own weights, generator, batcher and trainer, under one ticket and one bound.

    reward      1 for the right answer; a plan's is the mean of its answers'
    advantage   A_i = (R_i − mean R) / std R, over the plans of one prompt, and over the answers to all of them
    loss        −Σ w·min(ρA, clip(ρ, 0.8, 1.2)A) / number of tokens, as in grpo

flowrl run planner_executor --steps 60
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from flowrl import Ask, Call, Facts, Graph, In, Node, Out, Prompt, Sample, Scored, Serve
from flowrl.nodes import GroupAdvantage
from flowrl.options import (
    OnlineConfig,
    PolicyLoss,
    add_evaluation,
    make_batcher,
    make_generator,
    make_prompts,
    too_low,
)


class Team(Node):
    """Has each plan executed `answers` times; answers a held-out prompt in the same way, once."""

    plans: In[Sample]
    planned: Out[Scored]
    executed: Out[Scored]
    executor: Ask
    requests: Serve[Prompt, Sample]
    plan_held_out: Call[Prompt, Sample]
    execute_held_out: Call[Prompt, Sample]

    def __init__(self, *, answers: int, longest: int) -> None:
        self.answers, self.longest = answers, longest

    def facts(self) -> Facts:
        held_out = ("requests", "plan_held_out", "execute_held_out")
        return Facts(derives={"answer": self.answers}, longest_prompt=self.longest, optional=held_out)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self.requests.connected:
                tasks.create_task(self.requests.each(self.answer_held_out))
            await self.plans.each(self.play, concurrency=64)
            self.planned.close()
            self.executed.close()

    async def play(self, plan: Sample) -> None:
        if self.planned.was_sent():  # the plan is the last that is sent
            return
        children = await self.context.derive(plan, self.answers)
        answers = await asyncio.gather(*(self.answered(child, plan) for child in children))
        for answer in answers:
            await self.executed.send(answer)
        await self.planned.send(Scored.of(plan, float(np.mean([answer.reward for answer in answers]))))

    async def answered(self, child: Prompt, plan: Sample) -> Scored:
        reply = await self.executor.ask(with_plan(child, plan).token_ids, trained=True, sample=child)
        sample = self.executor.make_sample(child, [reply])
        return Scored.of(sample, float(reply.text.strip() == str(child.columns["answer"])))

    async def answer_held_out(self, prompt: Prompt) -> Sample:
        plan = await self.plan_held_out(prompt)
        return await self.execute_held_out(with_plan(prompt, plan))


def with_plan(prompt: Prompt, plan: Sample) -> Prompt:
    """The prompt with the plan before it."""
    return replace(prompt, token_ids=np.concatenate([plan.token_ids[plan.prompt_tokens :], prompt.token_ids]))


@dataclass(frozen=True)
class PlannerExecutor(OnlineConfig):
    loss: PolicyLoss = PolicyLoss()

    answers: int = 1
    """Answers of the executor to each plan."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, answers=1)
        if self.loss.compared_with(self) is not None:
            yield (
                "--objective.kl-coef compares with a reference, and two policies would need two; leave it out, or "
                "train adapters (--lora.rank 32), which have their reference in themselves"
            )


def graph(cfg: PlannerExecutor) -> Graph:
    g, tokens = Graph("planner_executor"), cfg.sampling.max_tokens
    prompts = g.add("prompts", make_prompts(cfg))
    team = g.add("team", Team(answers=cfg.answers, longest=cfg.data.max_prompt_tokens + tokens))
    generators, until = [], []
    for role, port in (("", team.planned), ("executor_", team.executed)):
        placed = cfg.place(cfg.generator.engine_size, cpus=0.5) | ({"replicas": 1} if role else {})
        generator = g.add(f"{role}generator", make_generator(cfg), **placed)
        advantage = g.add(f"{role}advantage", GroupAdvantage(size=cfg.sampling.group_size))
        batcher = g.add(f"{role}batcher", make_batcher(cfg))
        policy = replace(cfg.model, name="executor") if role else cfg.model
        how = {"temperature": cfg.sampling.temperature, "epochs": cfg.steps.epochs}
        made = cfg.trainer.build(policy, cfg.loss.build(tokens), **how)
        trainer = g.add(f"{role}trainer", made, **cfg.place(cfg.trainer.size, cpus=0.5))
        g.connect(port, advantage.scored)
        g.connect(advantage.groups, batcher.groups)
        g.connect(batcher.batches, trainer.batches, dispatch="gang")
        g.latest(trainer.weights, generator.weights)
        generators.append(generator)
        until.append(generator.weights)
    planner, executor = generators
    g.connect(prompts.prompts, planner.prompts)
    g.connect(planner.rollouts, team.plans)
    g.call(team.executor, executor.turns)
    g.ignore(executor.prompts)
    g.ignore(executor.rollouts)
    g.admit(
        prompts.prompts,
        until=tuple(until),
        staleness=cfg.steps.staleness,
        on_limit=cfg.steps.on_limit,
        look_ahead=cfg.steps.window,
    )
    if cfg.evaluation.evaluates:
        g.call(team.plan_held_out, planner.requests)
        g.call(team.execute_held_out, executor.requests)
    add_evaluation(g, cfg, planner, answering=team.requests)
    cfg.share_devices(g)
    return g

"""`Task`: what a policy is trained and evaluated on. Plain data; `flowrl.tasks.load_rows` reads the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.machine.disk import user_path
from flowrl.tasks.checks.answer_checks import CHECKS, OF_MIXTURE, OF_MIXTURE_WITH_CODE
from flowrl.tasks.rewards import MODEL, VERIFIER, names_model, parse_reward
from flowrl.tasks.rows import WORDED, check_template
from flowrl.tasks.task_syntax import PLUS, Term, parse_options, parse_sum, parse_weights, split_name, write_option

MADE = ("arithmetic", "sticks")
"""Sources that generate their rows, in addition to those of reasoning_gym."""


@dataclass(frozen=True)
class Task:
    """Prompts with answers, split into training and held-out rows, and the reward that judges responses."""

    name: str = "arithmetic"
    """`arithmetic`, `sticks`, `reasoning_gym/NAME`, a file of rows, a pattern of files, a dataset directory,
    or OWNER/NAME[@REVISION] on the Hugging Face Hub (docs/data.md).

    Options follow a colon: `reasoning_gym/chain_sum:max_terms=3,max_digits=1`, `questions.jsonl:prompt=problem`,
    `gsm8k.jsonl:prompt=question,check=math`. Several sources with weights: `0.7*problems.jsonl + 0.3*arithmetic`.
    With `extract=number` a reasoning_gym verifier is shown the last number of a response, with `extract=tag` its
    last <answer>…</answer>.
    """
    reward: str = ""
    """`file.py:function`, `package.module:function`, `http://HOST:PORT/PATH`, or a weighted sum of these.

    Such a sum is `verifier + 0.1*rules.py:short`; "" is the task's own verifier. See `flowrl.tasks.rewards`.
    """
    reward_weights: str = ""
    """Weights of the heads of a reward that has several, such as correct=1,format=0.2; heads not named weigh 1."""
    system_prompt: str = ""
    """First message of every conversation; "" leaves it to the model's chat template."""
    template: str = ""
    """How a question is asked, such as 'Solve: {prompt}'; {COLUMN} is another column of the row. {} also is the
    prompt."""
    reasoning: str = ""
    """Reasoning of messages (reasoning_content) apart from their text: inline as <think>...</think>; drop; "" gives it
    to the chat template, and refuses rows whose reasoning the template does not show."""

    def __post_init__(self) -> None:
        check_template(self.template)
        if self.reasoning not in WORDED:
            raise ConfigError(f"--task.reasoning is {self.reasoning!r}; choose one of {', '.join(WORDED[1:])}, or none")
        if self.reasoning and len(self.made_sources) == len(self.sources):
            raise ConfigError(
                f"--task.reasoning is {self.reasoning}, but task {self.name!r} makes its rows, which have no "
                "reasoning; leave it out"
            )
        if len(self.sources) > 1:
            for term in self.sources:
                Task(term.text, self.reward)
                if term.weight <= 0:
                    raise ConfigError(
                        f"task {self.name!r}: the weight of {term.text} is {term.weight:g}; it has to be above 0"
                    )
            if len({term.text for term in self.sources}) < len(self.sources):
                raise ConfigError(f"task {self.name!r} names a source twice; add up its weights")
            return
        if not self.source:
            raise ConfigError(f"task {self.name!r} names no source; write e.g. arithmetic or reasoning_gym/chain_sum")
        _ = self.options, self.head_weights
        if self.reward:
            parse_reward(self.reward)

    @property
    def head_weights(self) -> Mapping[str, float]:
        """The weights of a reward's heads by name. Raises ConfigError if one is no number."""
        return parse_weights("--task.reward-weights", self.reward_weights)

    @property
    def sources(self) -> tuple[Term, ...]:
        """The sources of a mixture with their weights; for another task, its name as the only source."""
        return parse_sum(self.name) if len(PLUS.split(self.name)) > 1 else (Term(self.name),)

    def with_option(self, key: str, value: str, *, unless: str = "") -> Task:
        """The task with this option added to each source that may have files, except where the source already has the
        option or the option `unless`."""
        found = []
        for term in self.sources:
            text, made = term.text, term.text in self.made_sources
            if not made and Task(text).options.keys().isdisjoint({key, unless}):
                source, options = split_name(text)
                text = f"{source}:" + ",".join(filter(None, (options, write_option(key, value))))
            weight = f"{term.weight!r}*" if term.weight != 1 else ""
            found.append(f"{weight}{text}" + (f" as {term.name}" if term.name else ""))
        return replace(self, name=" + ".join(found))

    @property
    def made_sources(self) -> tuple[str, ...]:
        """The sources that generate their rows, so have no files; with their options."""
        named = {term.text: split_name(term.text)[0] for term in self.sources}
        return tuple(text for text, name in named.items() if name in MADE or name.startswith("reasoning_gym/"))

    @property
    def source_names(self) -> Mapping[str, str]:
        """Short names of a mixture's sources by their texts: what follows `as`, else the last part of the source's
        name; a name that several sources would have is followed by the source's number. {} for a task with one
        source."""
        if len(self.sources) < 2:
            return {}
        short = [(term.name or Path(split_name(term.text)[0]).name.split(".")[0]) for term in self.sources]
        short = [name.replace("/", "_") for name in short]
        names = dict[str, str]()
        for number, (term, name) in enumerate(zip(self.sources, short, strict=True), start=1):
            unique = f"{name}_{number}" if short.count(name) > 1 else name
            while unique in names.values() or (unique != name and unique in short):
                unique += f"_{number}"
            names[term.text] = unique
        return names

    @property
    def generated(self) -> bool:
        """Whether a source is arithmetic or of reasoning_gym (not sticks): these generate their rows, so no file limits
        them."""
        names = [split_name(term.text)[0] for term in self.sources]
        return any(name == "arithmetic" or name.startswith("reasoning_gym/") for name in names)

    @property
    def source(self) -> str:
        """The name without its options."""
        return split_name(self.name)[0]

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the name; values are Python literals where they parse as such, else text."""
        return parse_options(f"task {self.name!r}", split_name(self.name)[1])

    @property
    def verifier(self) -> str:
        """The reward that scores responses, as text."""
        return self.reward or self.own_verifier

    @property
    def own_verifier(self) -> str:
        """The source's own verifier function, as `place:function`."""
        if len(self.sources) > 1:
            with_code = any(Task(term.text).own_verifier == CHECKS["code"] for term in self.sources)
            return OF_MIXTURE_WITH_CODE if with_code else OF_MIXTURE
        if (check := self.options.get("check")) in CHECKS and check != "exact":
            return CHECKS[str(check)]
        if self.source.startswith("reasoning_gym/"):
            return "flowrl.tasks.reasoning:score"
        return "flowrl.tasks.checks.answer_checks:exact_match"

    @property
    def compares(self) -> bool:
        """Whether the source's own verifier is the reward, or a part of it."""
        return any(part.place == VERIFIER for part in parse_reward(self.reward or VERIFIER))

    @property
    def by_model(self) -> Task:
        """The task as a graph's reward model scores it: within the sum if the task's reward names the model, else by
        the model only."""
        return self if names_model(self.reward) else replace(self, reward=MODEL)

    @property
    def path(self) -> Path:
        """The path of a task with rows on disk; meaningless for generated tasks."""
        return user_path(self.source)

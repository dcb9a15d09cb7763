"""What was sampled is what was trained, where the text alone would not say it: a run whose episodes retokenize.

    python -m benchmarks.agents.identity [--episodes 1024]

`flowrl run agent_game` on Ray, vLLM and ZeRO with a policy whose tokenizer has merges, sampled hot, on episodes of
several turns: their environment takes any reply. The learning rate is 0. All episodes are kept with their token ids.
Each reply is decoded and tokenized again; counted are the replies that become other ids, and the episodes with such a
reply. Whoever trains on the text trains those on tokens that nobody sampled.

The exit status is 1 unless the audit is ok, the trainer was fed as many spans as replies were sampled, each of them is
proven by the digest that the generator booked, and the share of episodes is at least `least_share`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.agents import uneven_env
from flowrl.errors import FlowrlError
from flowrl.models import Policy, load_tokenizer, resolve
from flowrl.nodes.episodes.episode_reports import is_retokenized
from flowrl.runtime.audit.audit import AuditReport, audit
from flowrl.runtime.samples.rollout_files import columns_of, rollout_files

ROOT = Path(__file__).parents[2]
KEPT = ("--keep-samples", "all", "--keep-token-ids", "--keep-episodes", "0")
FIXED = ("--lr", "0", "--evaluate", "0", "--limits.tokens", "512", *KEPT)
FED = -1
"""The version of a span that was fed."""


@dataclass(frozen=True)
class IdentityRun:
    """Options of the command."""

    episodes: int = 1024
    """That are trained; a multiple of `groups` x `group_size`."""
    groups: int = 8
    """So many in a step."""
    group_size: int = 8
    replies: int = 2
    """So many has each episode."""
    max_tokens: int = 10
    """Tokens of a reply at most."""
    policy: str = "smollm2"
    temperature: float = 1.2
    least_share: float = 0.2
    """The least share of the episodes that has to retokenize differently."""
    seed: int = 0
    run_dir: Path | None = None
    """Where the run is kept; it has to have ended, or not to be there. Without it a temporary directory is used."""


@dataclass(frozen=True)
class Retokenized:
    """What was found in the trained episodes."""

    episodes: int
    replies: int
    replies_differ: int
    episodes_differ: int
    """Those with a reply that differs."""

    @classmethod
    def of(cls, episodes: Sequence[Sequence[bool]]) -> Retokenized:
        """For each reply of each episode, whether it is_retokenized differently."""
        replies = [differs for one in episodes for differs in one]
        return cls(len(episodes), len(replies), sum(replies), sum(map(any, episodes)))

    def lines(self) -> Iterator[str]:
        share = self.replies_differ / max(1, self.replies)
        yield f"replies that retokenize differently   {self.replies_differ} of {self.replies}, {share:.3f}"
        yield f"episodes that retokenize differently  {self.episodes_differ} of {self.episodes}, {self.share:.3f}"

    @property
    def share(self) -> float:
        """The part of the episodes that differs."""
        return self.episodes_differ / max(1, self.episodes)


def replies_of(token_ids: Sequence[int], spans: Sequence[dict[str, int]]) -> list[list[int]]:
    """The ids of each reply of a kept episode. A reply that was sampled by several versions has several spans."""
    replies: list[list[int]] = []
    place, sampled = 0, False
    for span in spans:
        ids = list(token_ids[place : place + span["tokens"]])
        if span["version"] != FED:
            if sampled:
                replies[-1] += ids
            else:
                replies.append(ids)
        sampled = span["version"] != FED
        place += span["tokens"]
    return replies


def counted(run_dir: Path, tokenizer: Any) -> Retokenized:
    """Read the trained episodes that the run kept."""
    episodes = []
    for file in rollout_files(run_dir):
        for row in columns_of(file.path, ["state", "token_ids", "spans"]).to_pylist():
            if row["state"] == "trained":
                episodes.append([is_retokenized(tokenizer, ids) for ids in replies_of(row["token_ids"], row["spans"])])
    return Retokenized.of(episodes)


def play(options: IdentityRun, run_dir: Path) -> float:
    """`flowrl run`, its output shown. Returns its seconds; raises FlowrlError if it fails."""
    steps, rest = divmod(options.episodes, options.groups * options.group_size)
    if rest or not steps:
        raise FlowrlError(f"--episodes is {options.episodes}; it has to be a multiple of --groups x --group-size")
    environment = f"{uneven_env.__file__}:Uneven:turns={options.replies},step_s=0.0,often=0"
    sizes = ("--groups-per-step", str(options.groups), "--group-size", str(options.group_size), "--steps", str(steps))
    policy = ("--policy", options.policy, "--temperature", str(options.temperature), "--seed", str(options.seed))
    more = ("--environment", environment, "--max-tokens", str(options.max_tokens), "--run-dir", str(run_dir))
    command = [sys.executable, "-m", "flowrl.cli", "run", "graphs/agent_game.py", "--plain"]
    began_s = time.monotonic()
    status = subprocess.run([*command, *policy, *sizes, *more, *FIXED], cwd=ROOT, check=False).returncode
    if status:
        raise FlowrlError(f"the run ended with status {status}")
    return time.monotonic() - began_s


def missing(found: Retokenized, report: AuditReport, options: IdentityRun) -> Iterator[str]:
    """What is not as it has to be."""
    spans, proven = report.figures["policy spans"], report.figures["policy spans proven"]
    if not report.ok:
        yield "the audit is not ok"
    if found.episodes != options.episodes:
        yield f"{found.episodes} trained episodes were kept, of {options.episodes}"
    if not spans == proven == found.replies:
        yield f"{found.replies} replies were sampled, {spans} spans were fed to the trainer, {proven} are proven"
    if found.share < options.least_share:
        yield f"only {found.share:.3f} of the episodes retokenize differently, of {options.least_share}"


def main(options: IdentityRun) -> int:
    with ExitStack() as stack:
        run_dir = options.run_dir or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        try:
            seconds = play(options, run_dir)
            report = audit(run_dir)
            found = counted(run_dir, load_tokenizer(resolve(Policy(options.policy))))
        except FlowrlError as problem:
            print(f"identity: {problem}", file=sys.stderr)
            return 2
    problems = list(missing(found, report, options))
    proven = report.figures["policy spans proven"]
    print(f"\n{options.policy} at temperature {options.temperature}, {seconds:.0f} s")
    for line in found.lines():
        print(line)
    print(f"spans fed to the trainer              {report.figures['policy spans']}, {proven} proven")
    print(f"audit: {'ok' if report.ok else 'FAILED'}")
    figures = {**asdict(found), "proven": proven, "audit_ok": report.ok, "seconds": round(seconds, 1)}
    print(json.dumps({"benchmark": "identity", **figures}))
    for text in problems:
        print(f"identity: {text}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(IdentityRun, description=__doc__)))

"""The child of a `RewardWorker`: it loads one function and answers its calls. See `worker` for the protocol."""

from __future__ import annotations

import os
import sys

from flowrl.errors import ConfigError
from flowrl.tasks.reward_calls import child
from flowrl.tasks.reward_calls.judge import BadReward, load_judge


def serve(place: str, *asks: str) -> None:
    """The main loop of the child process; `asks` are verifiers that the function asks."""
    child.die_with_parent()
    inbox, outbox = os.fdopen(0, "rb", closefd=False), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        judge = load_judge(place)
        prepare(place)
        for verifier in asks:
            load_judge(verifier)
            prepare(verifier)
    except ConfigError as problem:
        child.write(outbox, {"error": str(problem)})
        return
    child.write(outbox, {})
    while (request := child.read(inbox)) is not None:
        try:
            verdicts = judge(request["prompts"], request["responses"], request["columns"])
        except BadReward as bad:
            child.write(outbox, {"error": str(bad), "reason": bad.reason})
        else:
            told = {"rewards": verdicts.rewards, "scores": verdicts.scores, "logs": dict(verdicts.logs)}
            child.write(outbox, {**told, "heads": dict(verdicts.heads)})


def prepare(place: str) -> None:
    """Let one of flowrl's verifiers import what it needs. Otherwise its first call does so, which has a limit of some
    seconds."""
    module = place.partition(":")[0]
    if module.startswith("flowrl.tasks."):
        getattr(sys.modules[module], "prepare", lambda: None)()


if __name__ == "__main__":
    serve(*sys.argv[1:])

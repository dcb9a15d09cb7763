"""What vLLM spawns begins with our module: watched from its first moment, and collecting again once loaded."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
from typing import Any

import pytest

from flowrl.weights.vllm_process.engine_process import FIRST, PARENT_VARIABLE, begun_by_us

SPAWN = multiprocessing.get_context("spawn")


def facts() -> dict[str, Any]:
    """Of the process that runs this; the collection in between is the one that vLLM asks for."""
    before = gc.isenabled()
    gc.collect()
    return {
        "first": sys.modules["__main__"].__spec__.name,  # type: ignore[union-attr]
        "watched": any(thread.name == "flowrl-parent-watch" for thread in threading.enumerate()),
        "collects": (before, gc.isenabled()),
    }


def child(answers: Any, generations: int) -> None:
    """The facts of this process and of `generations` more, each the child of the one before."""
    answers.put(facts())
    if generations:
        process = SPAWN.Process(target=child, args=(answers, generations - 1))
        process.start()
        process.join()


@pytest.mark.timeout(60)
def test_children_and_their_children_are_watched_and_collect_again_once_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT_VARIABLE, str(os.getpid()))
    mine = sys.modules["__main__"].__spec__
    answers = SPAWN.SimpleQueue()
    with begun_by_us():
        process = SPAWN.Process(target=child, args=(answers, 1))
        process.start()
    process.join()
    assert process.exitcode == 0
    expected = {"first": FIRST, "watched": True, "collects": (False, True)}
    assert [answers.get(), answers.get()] == [expected, expected]
    assert sys.modules["__main__"].__spec__ is mine

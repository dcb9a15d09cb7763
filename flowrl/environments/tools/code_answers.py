"""The verifier of `check=code`: runs the program of a response in a sandbox, against the tests of the row's answer.

Every response has its own interpreter (`sandbox`), which has no network and sees no files but Python's own. The program
runs first, then each test. A test has passed if its code ran to its end. This is shown by a printed text that is drawn
at random for this test and that the program has never seen. Outputs are compared outside the sandbox.

A program that raises, exits, or takes too much time, too much memory or too many processes has failed, and nothing of
it is left. As in other such harnesses, a program shares an interpreter with its tests: one that is written to attack
the harness can make asserts pass. It cannot fake outputs.

Waits: for the interpreter, at most `case_s` for a test and `total_s` for a response (`flowrl.tasks.checks.code_tests`).
A test that takes longer ends the response.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from flowrl.environments.tools.sandbox.sandbox_process import (
    SandboxEnded,
    SandboxKind,
    SandboxProcess,
    SandboxRefused,
    SandboxSettings,
)
from flowrl.errors import ConfigError
from flowrl.tasks.checks.code_tests import CASE_S, TOTAL_S, CodeTests, given_tests, program_of, time_limits

T = TypeVar("T")
MEMORY_BYTES = 512 << 20
OUTPUT_BYTES = 1 << 20
"""Maximum bytes that a program may print beyond what it has to print."""
STREAMS = """
def _set_streams():
    import os, sys
    with open(".input", "w+b") as file:
        os.unlink(".input")
        file.write({given!r}.encode(errors="replace"))
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
_set_streams()
del _set_streams
"""
"""Standard input is a file, as expected by programs that read its buffer or its descriptor. Standard error is
discarded."""


@dataclass(frozen=True)
class Tried:
    """The result of one program."""

    passed: float = 0.0
    """Share of its tests that passed."""
    timed_out: bool = False
    out_of_memory: bool = False
    """Whether it, or what it started, exceeded the memory of its sandbox."""


def judged_in(
    kind: SandboxKind,
    prompts: Sequence[str],
    responses: Sequence[str],
    *,
    answer: Sequence[Any],
    entry_point: Sequence[str | None] | None = None,
    test_imports: Sequence[Any] | None = None,
    test_setup_code: Sequence[str | None] | None = None,
    case_s: Sequence[float | None] | None = None,
    total_s: Sequence[float | None] | None = None,
) -> dict[str, Any]:
    """1 if the response's program passes every test of the answer, else 0; the share of tests passed is logged.

    `test_imports` (a list of lines, or text) and `test_setup_code` are executed before the program.
    """
    columns = (entry_point, test_imports, test_setup_code, case_s, total_s)
    entries, imports, setups, cases, totals = (column or [None] * len(responses) for column in columns)
    before = []
    for lines, text in zip(imports, setups, strict=True):
        joined = lines if isinstance(lines, str) else "\n".join(lines or ())
        before.append("\n".join(filter(None, (joined, text))))
    tests = [given_tests(right, entry) for right, entry in zip(answer, entries, strict=True)]
    programs = [program_of(response) for response in responses]
    times = [time_limits(*of_row) for of_row in zip(cases, totals, strict=True)]
    tried = run_to_end(run_tests(kind, [*zip(before, programs, tests, times, strict=True)]))
    return {
        "rewards": [float(one.passed == 1.0) for one in tried],
        "logs": {
            "tests_passed": [one.passed for one in tried],
            "timed_out": [float(one.timed_out) for one in tried],
            "out_of_memory": [float(one.out_of_memory) for one in tried],
        },
    }


code = partial(judged_in, "namespaces")
"""The verifier of check=code."""
code_without_namespaces = partial(judged_in, "limits")
"""The same for machines that do not allow user namespaces: programs may then read files and use the network."""
WITHOUT_NAMESPACES = f"{__name__}:code_without_namespaces"


async def run_tests(
    kind: SandboxKind, wanted: Sequence[tuple[str, str, CodeTests | None, tuple[float, float]]]
) -> list[Tried]:
    slots = asyncio.Semaphore(os.cpu_count() or 1)

    async def one(setup: str, program: str, tests: CodeTests | None, times: tuple[float, float]) -> Tried:
        if tests is None:
            return Tried()
        async with slots:
            return await try_program(kind, setup, program, tests, case_s=times[0], total_s=times[1])

    return list(await asyncio.gather(*(one(*each) for each in wanted)))


async def try_program(
    kind: SandboxKind,
    setup: str,
    program: str,
    tests: CodeTests,
    *,
    case_s: float = CASE_S,
    total_s: float = TOTAL_S,
) -> Tried:
    """Run a program and its tests. Raises ConfigError if this machine does not allow a sandbox."""
    passed = 0
    try:
        async with asyncio.timeout(total_s):
            if tests.pieces:
                passed = await passes_test(kind, f"{setup}\n{program}", tests.pieces, case_s)
            for given, needed in tests.cases:
                async with asyncio.timeout(case_s):
                    passed += await prints_expected(kind, setup, program, given, needed)
    except TimeoutError:
        return Tried(timed_out=True)
    except SandboxEnded:
        return Tried(out_of_memory=True)
    return Tried(passed / (len(tests.pieces) + len(tests.cases)))


async def passes_test(kind: SandboxKind, program: str, pieces: Sequence[str], case_s: float) -> int:
    """The number of pieces that ran to their end. Raises TimeoutError if one, or the program itself, exceeds
    `case_s`, and SandboxEnded if too much memory is held."""
    passed = 0
    async with start_interpreter(kind) as interpreter:
        try:
            async with asyncio.timeout(case_s):
                if (await interpreter.run_code(program)).failed:
                    return 0
            for piece in pieces:
                mark = f"\n{secrets.token_hex(16)}"
                async with asyncio.timeout(case_s):
                    ran = await interpreter.run_code(f"{piece}\nprint({mark!r})")
                passed += not ran.failed and ran.text.rstrip("\n").endswith(mark)
        except SandboxEnded as ended:
            if ended.out_of_memory:
                raise
    return passed


async def prints_expected(kind: SandboxKind, setup: str, program: str, given: str, needed: str) -> bool:
    """Whether the program prints what it has to; blanks at the ends of lines and around the whole text are ignored."""
    async with start_interpreter(kind, output_bytes=len(needed.encode(errors="replace")) + OUTPUT_BYTES) as interpreter:
        try:
            prepared = await interpreter.run_code(f"{STREAMS.format(given=given)}\n{setup}\npass")
            ran = await interpreter.run_code(f"{program}\npass")
        except SandboxEnded as ended:
            if ended.out_of_memory:
                raise
            return False
    return not prepared.failed and not ran.failed and printed_lines(ran.text) == printed_lines(needed)


def printed_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@asynccontextmanager
async def start_interpreter(kind: SandboxKind, *, output_bytes: int = OUTPUT_BYTES) -> AsyncIterator[SandboxProcess]:
    """The sandbox of one program. When the context is left, it ends with everything that it has started."""
    process = None
    try:
        process = SandboxProcess(SandboxSettings(kind, memory_bytes=MEMORY_BYTES, output_bytes=output_bytes), seed=0)
        await process.start_sandbox()
        yield process
    except SandboxRefused as problem:
        raise ConfigError(
            f"check=code cannot isolate programs on this machine ({problem}); allow user namespaces there, or "
            "accept programs that can read files and use the network, with "
            f"--task.reward {WITHOUT_NAMESPACES}"
        ) from None
    finally:
        if process is not None:
            await process.end_sandbox()


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which runs in this thread, or in another one if this thread has a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as other:
        return other.submit(asyncio.run, work).result()

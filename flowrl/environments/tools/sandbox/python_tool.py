"""The tool `python`: code that the policy writes is executed in an isolated interpreter of its episode.

The interpreter starts at the first call, and keeps its variables and its files until the episode's end, as a notebook
does. Whatever the code does is reported to the policy as text. After a call that ends the interpreter or exceeds its
time, the variables and files are lost; the next call gets a new interpreter.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import get_args

from flowrl.environments.open_episode import EnvironmentFailed
from flowrl.environments.tools.sandbox.sandbox_process import (
    Ran,
    SandboxEnded,
    SandboxKind,
    SandboxProcess,
    SandboxRefused,
    SandboxSettings,
)
from flowrl.environments.tools.tool import CALL_S, Tool, ToolError, ToolSource, describe_function
from flowrl.errors import ConfigError

LOST = "Its variables and files are lost; the next call has a new interpreter."
SILENT = "The code printed nothing."
MARK_BYTES = 256
"""Room for text in addition to the output."""


@dataclass(frozen=True)
class PythonTool(ToolSource):
    """`python(code)`, with limits for each episode. Raises ConfigError for invalid limits."""

    sandbox: SandboxKind = "namespaces"
    """ "limits" does without namespaces: the code may then read files and use the network as the run's user."""
    call_s: float = CALL_S
    memory_bytes: int = 1 << 30
    """Memory of all processes and files in memory together, and address space of each process."""
    disk_bytes: int = 64 << 20
    """Size of the working directory (with namespaces), or of each file (without)."""
    output_bytes: int = 8192
    """Largest output of a call; the middle of a longer one is left out."""
    nested: bool = False
    """The code may make namespaces, for a program that brings a sandbox of its own, such as bubblewrap."""

    def __post_init__(self) -> None:
        if self.sandbox not in get_args(SandboxKind):
            raise ConfigError(f"sandbox of the tool python is {self.sandbox!r}; it has to be namespaces or limits")
        if not isinstance(self.call_s, int | float) or not self.call_s > 0:
            raise ConfigError(f"call_s of the tool python is {self.call_s!r}; it has to be a number above 0")
        for key, least in (("memory_bytes", 1 << 26), ("disk_bytes", 4096), ("output_bytes", 64)):
            value = getattr(self, key)
            if not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"{key} of the tool python is {value!r}; it has to be a whole number of at least {least}"
                )

        if not isinstance(self.nested, bool):
            raise ConfigError(f"nested of the tool python is {self.nested!r}; it has to be True or False")
        if self.nested and self.sandbox == "limits":
            raise ConfigError("nested of the tool python has no effect with sandbox=limits; leave it out")

    @property
    def name(self) -> str:
        return "python"

    def check(self) -> None:
        """Start an interpreter and let it compute a value."""
        if sys.platform != "linux":
            raise ConfigError("the tool python needs Linux, whose limits and namespaces shut its code in")
        try:
            ran = asyncio.run(self._try_sandbox())
            why = "" if ran == Ran("42\n", failed=False) else f"the trial 6 * 7 returned {ran.text!r}"
        except (SandboxRefused, SandboxEnded) as problem:
            why = str(problem)
        if not why:
            return
        hint = ""
        if self.sandbox == "namespaces":
            hint = (
                "; allow user namespaces on this machine (in a container they may need --privileged), or accept "
                "python:sandbox=limits, where the code can read files and use the network"
            )
        raise ConfigError(f"the tool python cannot isolate its code on this machine ({why}){hint}")

    async def _try_sandbox(self) -> Ran:
        process = SandboxProcess(self._settings, seed=0)
        try:
            await process.start_sandbox()
            return await process.run_code("6 * 7")
        finally:
            await process.end_sandbox()

    @property
    def _settings(self) -> SandboxSettings:
        return SandboxSettings(
            kind=self.sandbox,
            memory_bytes=self.memory_bytes,
            disk_bytes=self.disk_bytes,
            output_bytes=self.output_bytes,
            nested=self.nested,
        )

    @asynccontextmanager
    async def session(self, seed: int) -> AsyncIterator[Sequence[Tool]]:
        python = PythonSession(self._settings, seed)
        most_bytes = self.output_bytes + MARK_BYTES
        try:
            yield [Tool(python.python, describe_function(python.python), self.call_s, most_bytes, when_stopped=LOST)]
        finally:
            await python.end_sandbox()


class PythonSession:
    """The interpreter of one episode, and a new one when it has ended."""

    def __init__(self, settings: SandboxSettings, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self._process: SandboxProcess | None = None

    async def python(self, code: str) -> str:
        """Executes Python code and returns what it prints, and the value of its last line if that is an expression.
        Variables and files are kept for the next call.

        Args:
            code: The code.
        """
        try:
            if self._process is None:
                self._process = SandboxProcess(self._settings, seed=self._seed)
                await self._process.start_sandbox()
            ran = await self._process.run_code(code)
        except SandboxRefused as problem:
            await self.end_sandbox()
            raise EnvironmentFailed("env_raised", f"the tool python could not be started: {problem}") from None
        except SandboxEnded as ended:
            await self.end_sandbox()
            raise ToolError(f"{ended} {LOST}") from None
        except BaseException:  # the call's time is over, or the call is given up
            await self.end_sandbox()
            raise
        if ran.failed:
            raise ToolError(ran.text)
        return ran.text or SILENT

    async def end_sandbox(self) -> None:
        """End the interpreter."""
        process, self._process = self._process, None
        if process is not None:
            await process.end_sandbox()

"""Runs synchronous reward functions in a separate process, which is killed when a call takes too long.

One call is one length-prefixed msgpack message each way, over the child's standard input and output.
Output that the function prints goes to standard error. The child ends when its input ends or its parent dies.
A call ends with the answer, the timeout, or the child's death; so does loading, whose limit is LOADED_WITHIN_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.program_variables import EVERYTHING, program_variables
from flowrl.tasks.reward_calls import child
from flowrl.tasks.reward_calls.judge import BadReward, RowColumns, Verdicts

LOADED_WITHIN_S = 600.0
"""A module may load a model when it is imported."""


class RewardWorker:
    """One child process for one function. One call at a time.

    A function that limits the time of its calls itself has `own_s`, the longest time of a call; its timeout is never
    less. Verifiers that the function `asks` are loaded with it.
    """

    def __init__(
        self,
        place: str,
        *,
        timeout_s: float,
        own_s: Callable[[RowColumns], float] | None = None,
        asks: Sequence[str] = (),
    ) -> None:
        self.place = place
        self.timeout_s = timeout_s
        self.own_s = own_s
        self.asks = tuple(asks)
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Start the child and load the function there. Raises ConfigError if it does not load, BadReward if it ends."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "flowrl.tasks.reward_calls.worker_child",
            self.place,
            *self.asks,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=program_variables({"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}, keep=EVERYTHING),
        )
        try:
            async with asyncio.timeout(LOADED_WITHIN_S):
                answer = await self._receive()
        except TimeoutError:
            await self.close()
            raise ConfigError(
                f"{self.place} is not loaded after {LOADED_WITHIN_S:g} s; do slow set-up at its first call"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._died()
            said = f"{self.place} ended its process (status {code}) while it was loaded"
            raise BadReward("reward_died", said) from None
        except asyncio.CancelledError:  # the next call would take this answer for its own
            await self.close()
            raise
        if "error" in answer:
            await self.close()
            raise ConfigError(answer["error"])

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> Verdicts:
        """Call the function. Raises BadReward; after a timeout or a crash the next call uses a new child."""
        async with self._turn:
            if self._process is None:
                await self.start()
            limit_s = self.timeout_s if self.own_s is None else max(self.timeout_s, self.own_s(columns))
            try:
                async with asyncio.timeout(limit_s):
                    await self._send({"prompts": prompts, "responses": responses, "columns": columns})
                    answer = await self._receive()
            except TimeoutError:
                await self.close()
                raise BadReward("reward_timed_out", f"{self.place} took more than {limit_s} s") from None
            except (asyncio.IncompleteReadError, ConnectionError):
                code = await self._died()
                raise BadReward("reward_died", f"{self.place} ended its process (status {code})") from None
            except asyncio.CancelledError:
                await self.close()
                raise
        if "error" in answer:
            raise BadReward(answer["reason"], answer["error"])
        logs = {name: tuple(values) for name, values in answer["logs"].items()}
        return Verdicts(tuple(answer["rewards"]), tuple(answer["scores"]), logs, answer["heads"])

    async def close(self) -> None:
        """Kill the child."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _died(self) -> int | None:
        process = self._process
        if process is not None:
            with contextlib.suppress(TimeoutError):  # a child that only closed its output is killed
                await asyncio.wait_for(process.wait(), 1.0)
        await self.close()
        return None if process is None else process.returncode

    async def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(child.packed(message))
        await self._process.stdin.drain()

    async def _receive(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        message: dict[str, Any] = await child.receive(self._process.stdout)
        return message

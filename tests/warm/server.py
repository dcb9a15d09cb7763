"""A server of warm interpreters: `python server.py KIND SOCKET READY` imports what such processes do, then forks them.

Only its first thread may run while it forks. numpy's OpenBLAS has threads of its own, and ends them before a fork.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

TRAINER = (
    "torch",
    "torch._dynamo",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "accelerate",
    "deepspeed",
    "google.protobuf.descriptor_pb2",
    "pandas",
    "peft",  # with it comes bitsandbytes, and with that torch's compiler
    "pydantic.v1",
    "requests",
    "tyro",
    "zmq",
    "flowrl.options",
    "flowrl.runtime.driver.launch",
    "flowrl.runtime.process.actor",
    "flowrl.training.learner",
)
PACKAGES = {
    "trainer": TRAINER,
    # What a generator's host takes of vLLM, but for what imports Ray.
    "host": (*TRAINER, "vllm.config", "vllm.engine.arg_utils", "vllm.engine.protocol"),
    "generator": (
        "torch",
        "transformers",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.llama",
        "vllm.model_executor.models.qwen2",
    ),
}
PR_SET_PDEATHSIG = 1
LOOK_EVERY_S = 1.0


class Server:
    """Forks a process for every connection, kills it when the connection ends, and tells its end."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        path.unlink(missing_ok=True)  # that of a server that was killed
        directory = os.open(path.parent, os.O_PATH)
        self.listener.bind(f"/proc/self/fd/{directory}/{path.name}")  # the whole path may be too long for a socket
        os.close(directory)
        self.listener.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.woken, self.wakes = socket.socketpair()
        self.wakes.setblocking(False)
        self.selector.register(self.woken, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakes.fileno(), warn_on_full_buffer=False)
        self.asking: dict[int, socket.socket] = {}
        """Process -> who asked for it."""

    def serve(self, owner: int) -> dict[str, Any] | None:
        """Serve until the owner has ended. Returns a request in the process that was forked for it, else None."""
        while _lives(owner):
            for key, _ in self.selector.select(LOOK_EVERY_S):
                if key.fileobj is self.listener:
                    request = self._fork()
                    if request is not None:
                        return request
                elif key.fileobj is self.woken:
                    self.woken.recv(4096)
                else:
                    self._left(key.fileobj)  # type: ignore[arg-type]
            self._reap()
        return None

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self.listener.accept()
        length, descriptors, *_ = socket.recv_fds(connection, 4, 250)
        body = b""
        while len(body) < int.from_bytes(length, "big"):
            part = connection.recv(1 << 16)
            if not part:
                break
            body += part
        request: dict[str, Any] = json.loads(body)
        process = os.fork()
        if not process:
            self._forget(connection)
            _place(descriptors, request["descriptors"])
            return request
        for number in descriptors:
            os.close(number)
        self.asking[process] = connection
        self.selector.register(connection, selectors.EVENT_READ)
        connection.sendall(f"{process}\n".encode())
        return None

    def _forget(self, connection: socket.socket) -> None:
        """In the forked process: drop what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        for one in (connection, self.listener, self.woken, self.wakes, *self.asking.values()):
            one.close()

    def _left(self, connection: socket.socket) -> None:
        """Kill the process of one who has ended."""
        for process, one in self.asking.items():
            if one is connection:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        self.selector.unregister(connection)

    def _reap(self) -> None:
        while self.asking:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            connection = self.asking.pop(process)
            with suppress(OSError):
                connection.sendall(f"{status}\n".encode())
            with suppress(KeyError):
                self.selector.unregister(connection)
            connection.close()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _place(descriptors: list[int], numbers: list[int]) -> None:
    """Give the descriptors the numbers that they had in the process that asked."""
    above = max([*numbers, *descriptors]) + 1
    for number in range(3):
        os.close(number)
    moved = []
    for number in descriptors:
        moved.append(os.dup2(number, above + len(moved)))
        os.close(number)
    for number, wanted in zip(moved, numbers, strict=True):
        os.dup2(number, wanted)
        os.close(number)


def _open_streams() -> None:
    """Standard streams as an interpreter opens them: those of the server know what its own files could do, such as
    seeking."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        opened = os.fdopen(number, "w", 1 if number == 2 else -1, encoding="utf-8", closefd=False)
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)


def _look_in(paths: str) -> None:
    """Have modules looked for in these in place of the server's own."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, paths.split(os.pathsep)), *(path for path in sys.path if path not in own)]


def become(request: dict[str, Any]) -> None:
    """Make this process what the request describes, and run it."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _look_in(request["environment"].get("PYTHONPATH", ""))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.nice(max(0, request["niceness"] - os.getpriority(os.PRIO_PROCESS, 0)))
    os.sched_setaffinity(0, request["cores"])
    sys.executable = request["executable"]
    _open_streams()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(request["cores"])))
    tempfile.tempdir = None
    gc.unfreeze = lambda: None  # vLLM's engine would look through all that imports have made when it ends
    program = types.ModuleType("__main__")
    program.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = program
    first, *rest = request["arguments"]
    if first == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), program.__dict__)
    elif first == "-m":
        module, *rest = rest
        sys.argv = ["-m", *rest]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, os.path.dirname(first))
        program.__dict__["__file__"] = first
        with open(first, "rb") as file:
            exec(compile(file.read(), first, "exec"), program.__dict__)


def main() -> None:
    kind, path, ready = sys.argv[1:]
    sys.path.pop(0)
    for name in PACKAGES[kind]:
        importlib.import_module(name)
    assert kind == "generator" or "ray" not in sys.modules, "Ray keeps the job's number that it is imported with"
    gc.collect()
    gc.freeze()
    server = Server(Path(path))
    os.write(int(ready), b"x")
    os.close(int(ready))
    request = server.serve(int(os.environ["FLOWRL_TESTS_OWNER"]))
    if request is not None:
        become(request)
    else:
        shutil.rmtree(Path(path).parent.parent, ignore_errors=True)


if __name__ == "__main__":
    main()

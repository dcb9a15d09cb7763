"""The interpreter of a sandbox: executes the code of one call after the other, with the same variables.

This script imports nothing of flowrl, and the sandbox receives only its source. Messages over its connection: "R" when
it is ready; then, for each text of code (its length in four bytes before it), "0" when it is done and "1" if it has
raised. What the code prints, the value of a last expression and a traceback all go to standard output.

The script is no part of the protection: the code can change every object here. Outside, everything that it sends is
treated as text only.
"""

from __future__ import annotations

import ast
import builtins
import json
import linecache
import os
import random
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from typing import Any

LENGTH = struct.Struct("<I")
TRACEBACK_CALLS = 10
"""Number of calls of a traceback that are shown, the innermost ones."""


def main(control: socket.socket, settings: dict[str, Any]) -> None:
    random.seed(settings["seed"])
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    mine, number = os.getpid(), 0
    control.sendall(b"R")
    while len(head := control.recv(LENGTH.size, socket.MSG_WAITALL)) == LENGTH.size:
        code = control.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL).decode()
        number += 1
        failed = execute_code(code, f"<call {number}>", names, mine)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the code may have replaced it by anything
                stream.flush()
        if settings["apart"]:
            # What the code has started ends: this is the first process of its namespace, and kills all others.
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            with suppress(ChildProcessError):
                while True:
                    os.waitpid(-1, 0)
        control.sendall(b"1" if failed else b"0")


def execute_code(code: str, name: str, names: dict[str, Any], mine: int) -> bool:
    """Execute code. Returns whether it has raised."""
    problem: BaseException | None = None
    try:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
            if value is not None:
                print(repr(value))
    except BaseException as raised:  # the boundary to the policy's code
        problem = raised
    if os.getpid() != mine:
        os._exit(0)  # a process that the code has forked has come to its end
    if problem is None or (isinstance(problem, SystemExit) and problem.code in (None, 0)):
        return False
    show_traceback(problem)
    return True


def show_traceback(problem: BaseException) -> None:
    """The traceback from the code's own first frame on."""
    trace = problem.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        found = traceback.TracebackException(type(problem), problem, trace, limit=-TRACEBACK_CALLS)
        sys.stdout.write("".join(found.format()))
    except BaseException:  # its text comes from the code too, and there may be no memory for it
        os.write(1, f"{type(problem).__name__}\n".encode())


if __name__ == "__main__":
    __file__ = "<string>"
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))

"""Stands for a process that a server of warm interpreters forks; becomes the real interpreter for all others.

`_fill` in __init__.py puts it in the virtual environment, with the paths of the real interpreter and of server.py. It
imports the standard library alone, as it is started hundreds of times.
"""

import fcntl
import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys

DIRECTORY = os.path.dirname(os.path.dirname(sys.argv[0]))
with open(f"{DIRECTORY}/paths") as paths:
    REAL, SERVER = paths.read().splitlines()
KINDS = {"default_worker.py": "host"}
"""Scripts, this one Ray's -> what their server has imported."""
MODULES = {
    "flowrl.cli": "trainer",
    "flowrl.commands.gpu_check.rank_process": "trainer",
    "flowrl.commands.gpu_check.stage_process": "trainer",
    "flowrl.training.scoring_rank": "trainer",
    "flowrl.agents.parser_trial": "generator",
    "tests": "trainer",
}
SPAWNED = "from multiprocessing.spawn import spawn_main"
"""So begins a process of `multiprocessing`; that is vLLM's engine."""
OF_ONE_PROCESS = (
    *("RAY_", "PYTEST_", "FLOWRL_", "VLLM_CPU_OMP_THREADS_BIND"),
    *("MAKE", "MFLAGS", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES"),
    *("OMP_NUM_", "MKL_NUM_", "OPENBLAS_NUM_", "NUMEXPR_", "RAYON_NUM_"),  # the fork sets its number of threads
    *("GLOO_SOCKET_", "NCCL_SOCKET_", "VLLM_HOST_IP", "RANK", "LOCAL_RANK", "LOCAL_SIZE", "WORLD_SIZE"),
    *("CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_", "TORCHINDUCTOR_CACHE_DIR", "AITER_", "PYTHONBREAKPOINT", "SPT_NOENV"),
)
"""Beginnings of the variables that are read after all imports, and so need no server of their own."""
OF_ONE_RAY = "/working_dir_files/"
"""In the paths of modules: a graph's directory, as this Ray has copied it. The fork looks there, too."""
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
MOST_SERVERS = 8


def kind_of(arguments):
    """What the process will import, or None if it is no process of a run."""
    if len(arguments) < 2 or "FLOWRL_TESTS_OWNER" not in os.environ:
        return None
    first, second = arguments[:2]
    if first == "-c":
        return "generator" if second.startswith(SPAWNED) else None
    if first == "-m":
        return MODULES.get(second) or MODULES.get(second.partition(".")[0])
    return KINDS.get(os.path.basename(first))


def become(arguments):
    os.execv(REAL, [sys.argv[0], *arguments])


def server_of(kind):
    """The socket of the server for this kind and these environment variables, started if there is none; None if there
    are too many."""
    leave_out = (*OF_ONE_PROCESS, "DS_ACCELERATOR") if kind == "generator" else OF_ONE_PROCESS  # DeepSpeed's alone
    same = {name: text for name, text in os.environ.items() if not name.startswith(leave_out)}
    paths = same.get("PYTHONPATH", "").split(os.pathsep)
    same["PYTHONPATH"] = os.pathsep.join(path for path in paths if OF_ONE_RAY not in path)
    same = sorted(same.items())
    name = hashlib.sha256(json.dumps([kind, same]).encode()).hexdigest()[:16]
    directory = f"{DIRECTORY}/servers"
    path = f"/proc/self/fd/{os.open(directory, os.O_PATH)}/{name}"  # the whole one may be too long for a socket
    connection = socket.socket(socket.AF_UNIX)
    with open(f"{directory}/lock-{name}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(path)
            return connection
        except OSError:
            if sum(not other.startswith("lock-") for other in os.listdir(directory)) >= MOST_SERVERS:
                with open(f"{DIRECTORY}/refused", "a") as refused:
                    refused.write(f"{json.dumps([kind, same])}\n")
                return None
        ready, told = os.pipe()
        start(kind, f"{directory}/{name}", told)
        os.close(told)
        if not os.read(ready, 1):
            return None
        os.close(ready)
    connection.connect(path)
    return connection


def start(kind, path, told):
    """Start a server that is no descendant of this process: whoever ends all that a run has left spares it."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    with open(f"{DIRECTORY}/{kind}-{os.path.basename(path)}.log", "w") as log:
        subprocess.Popen(
            [sys.argv[0], SERVER, kind, path, str(told)],
            executable=REAL,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(told,),
            start_new_session=True,
        )
    os._exit(0)


def open_descriptors(own):
    """All descriptors that the process was started with."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number != own and os.get_inheritable(number):
                found.append(number)
        except OSError:
            pass  # that of the listing itself
    return sorted(found)


def ask(connection, arguments):
    """Ask for the process. Returns its id, and what follows on the connection."""
    numbers = open_descriptors(connection.fileno())
    request = {
        "executable": sys.argv[0],
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "descriptors": numbers,
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    body = json.dumps(request).encode()
    socket.send_fds(connection, [len(body).to_bytes(4, "big")], numbers)
    connection.sendall(body)
    answers = connection.makefile()
    return int(answers.readline()), answers


def stand_for(process, answers):
    """Pass signals on to the process, and end as it ends."""

    def forward(number, frame):
        os.kill(process, number)

    for name in FORWARDED:
        signal.signal(getattr(signal, name), forward)
    status = answers.readline()
    status = int(status) if status else 9
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def main():
    arguments = sys.argv[1:]
    kind = kind_of(arguments)
    connection = server_of(kind) if kind else None
    if connection is None:
        become(arguments)
    stand_for(*ask(connection, arguments))


main()

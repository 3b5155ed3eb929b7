"""Starts ranks as forks of an interpreter that holds torch already: a start costs 50 ms, not 3 s.

One JSON request a line on stdin, `{"id", "argv", "env": [one a rank], "logs": folder}`, answered by
`{"id", "pids"}`; each rank that ends is told as `{"id", "rank", "code"}`. The ranks are real
processes with gloo between them; only their imports are shared. Ends with its stdin.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import runpy
import select
import signal
import sys
from pathlib import Path


def main() -> None:
    for module in ("torch._dynamo", "torch.distributed.checkpoint", "everstep.trainer.train"):
        importlib.import_module(module)

    children: dict[int, tuple[str, int]] = {}
    answer("ready")
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.02)
        if ready:
            line = sys.stdin.readline()
            if not line:
                break
            request = json.loads(line)
            pids = [fork(request, rank) for rank in range(len(request["env"]))]
            children |= {pid: (request["id"], rank) for rank, pid in enumerate(pids)}
            answer({"id": request["id"], "pids": pids})
        reap(children)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap(children: dict[int, tuple[str, int]]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            id_, rank = children.pop(pid)
            answer({"id": id_, "rank": rank, "code": os.waitstatus_to_exitcode(status)})


def fork(request: dict, rank: int) -> int:  # type: ignore[type-arg]  # JSON from the fixture
    if pid := os.fork():
        return pid
    code = 1
    try:
        become(request, rank)
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # noqa: BLE001  as the interpreter itself does at the end of a script
        import traceback

        traceback.print_exc()
        sys.last_value = sys.exc_info()[1]
    run_exit_handlers()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_exit_handlers() -> None:
    import atexit

    atexit._run_exitfuncs()


def become(request: dict, rank: int) -> None:  # type: ignore[type-arg]  # JSON from the fixture
    os.setsid()
    log = os.open(
        Path(request["logs"]) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, target)
    # `kill -USR1` shows where a rank stands that does not end.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(request["env"][rank])
    sys.argv = request["argv"]
    if sys.argv[0] == "-m":
        module = sys.argv[1]
        sys.argv = sys.argv[1:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def answer(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

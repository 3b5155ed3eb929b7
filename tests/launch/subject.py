"""A script with many endings, run warm and cold: both must come out alike."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time


def told() -> dict[str, object]:
    """Everything that a script can see of how it was started."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    status = open("/proc/self/status").read().splitlines()  # noqa: PTH123, SIM115  a short script
    masks = [line for line in status if line.startswith(("SigIgn", "SigBlk", "SigCgt"))]
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": str(sys.flags),
        "executable": sys.executable,
        "main": [main.__name__, main.__file__, spec and spec.name, type(main.__loader__).__name__],
        "names": sorted(vars(main)),
        "cwd": os.getcwd(),  # noqa: PTH109  as above
        "umask": os.umask(0o22),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "cpus": sorted(os.sched_getaffinity(0)),
        "signals": masks,
        "fds": [fd for fd in range(64) if os.path.exists(f"/proc/self/fd/{fd}")],  # noqa: PTH110
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "streams": [str(sys.stdin), str(sys.stdout), str(sys.stderr)],
        "comm": open("/proc/self/comm").read(),  # noqa: PTH123  as above
        "cmdline": open("/proc/self/cmdline", "rb").read().decode("utf-8", "backslashreplace"),  # noqa: PTH123  as above
        "environ": {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
    }


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def spawn() -> None:
    import multiprocessing

    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(2) as workers:
            found = workers.map(square, [1, 2, 3])
        assert [n for n, _ in found] == [1, 4, 9]
        assert os.getpid() not in [pid for _, pid in found]
        print(method)


def load_data() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(8.0))
    total = sum(float(batch.sum()) for (batch,) in DataLoader(data, batch_size=2, num_workers=2))
    print(total)


def random_numbers() -> None:
    import random

    import numpy as np
    import torch

    print(json.dumps([random.random(), np.random.rand(), torch.rand(1).item()]))


def say_signals() -> None:
    def heard(number: int, _: object) -> None:
        print(number, flush=True)
        if number == signal.SIGTERM:
            sys.exit(5)

    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, heard)
    print("ready", flush=True)
    while True:
        time.sleep(1)


def fail() -> None:
    raise ValueError("a bug")


def sleep() -> None:
    print("ready", flush=True)
    time.sleep(600)


def main() -> None:
    what = sys.argv[1]
    match what:
        case "told":
            print(json.dumps(told()))
        case "exit":
            sys.exit(int(sys.argv[2]))
        case "text":
            sys.exit("a text")
        case "_exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "atexit":
            import atexit

            atexit.register(print, "at exit")
        case "stdin":
            print(sys.stdin.read().upper(), end="")
        case _:
            globals()[what]()


if __name__ == "__main__":
    main()

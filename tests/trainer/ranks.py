"""Real ranks for tests: the client of forge.py."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.cli.demo.ports import free_port

HERE = Path(__file__).parent
DEADLINE_S = 90.0
ALONE_S = 30.0


def wait_until(condition: Callable[[], Any], *, what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Poll until it holds and return what it returned."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {deadline_s} s"
        time.sleep(0.01)
    return value


@dataclass
class Started:
    """Some ranks that were started together."""

    id: str
    pids: list[int]
    logs: Path
    codes: dict[int, int] = field(default_factory=dict)
    pump: Callable[[], None] = lambda: None
    bereaved: bool = False

    def wait(self, deadline_s: float = DEADLINE_S) -> list[int]:
        """Return every rank's exit code (-9 for SIGKILL).

        Once in some hundred times gloo leaves a rank whose peer died in its collective for ever
        (torch 2.13). Then it is killed, as its launcher would do.
        """
        if self.bereaved:
            with contextlib.suppress(AssertionError):
                wait_until(self._ended, what="their end", deadline_s=ALONE_S)
            self.kill()
        try:
            wait_until(self._ended, what="the end of the ranks", deadline_s=deadline_s)
        except AssertionError as exc:
            self.kill(how=signal.SIGUSR1)
            time.sleep(0.5)
            raise AssertionError(f"{exc}\n{self.log()}") from None
        return [self.codes[rank] for rank in range(len(self.pids))]

    def wait_for_one(self) -> int:
        """Return the first rank that ended."""

        def one() -> list[int]:
            self.pump()
            return [rank + 1 for rank in self.codes]

        return int(wait_until(one, what="the end of one rank")[0]) - 1

    def kill(self, *ranks: int, how: signal.Signals = signal.SIGKILL) -> None:
        self.bereaved |= how == signal.SIGKILL
        for rank in ranks or range(len(self.pids)):
            if rank not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], how)

    def log(self, rank: int | None = None) -> str:
        ranks = range(len(self.pids)) if rank is None else [rank]
        paths = [self.logs / f"rank-{r}.log" for r in ranks]
        return "\n".join(p.read_text(errors="replace") for p in paths if p.exists())

    def _ended(self) -> bool:
        self.pump()
        return len(self.codes) == len(self.pids)


class Forge:
    """Speaks with tests/trainer/forge.py."""

    def __init__(self) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")}
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "forge.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._started: dict[str, Started] = {}
        assert self._lines.get(timeout=DEADLINE_S) == '"ready"\n'

    def start(
        self, world: int, argv: Sequence[str | Path], logs: Path, env: Mapping[str, str]
    ) -> Started:
        shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(free_port())} | dict(env)
        places = [{"RANK": str(r), "LOCAL_RANK": str(r)} | shared for r in range(world)]
        id_ = uuid.uuid4().hex
        folder = logs / id_
        folder.mkdir(parents=True)
        started = Started(id_, [], folder, pump=self._pump)
        self._started[id_] = started
        request = {"id": id_, "argv": [str(a) for a in argv], "env": places, "logs": str(folder)}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

        def known() -> list[int]:
            self._pump()
            return started.pids

        wait_until(known, what="the start of the ranks")
        return started

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)

    def _pump(self) -> None:
        while not self._lines.empty():
            message = json.loads(self._lines.get())
            started = self._started[message["id"]]
            if "pids" in message:
                started.pids = message["pids"]
            else:
                started.codes[message["rank"]] = message["code"]


StartRanks = Callable[..., Started]
WriteConfig = Callable[..., Path]

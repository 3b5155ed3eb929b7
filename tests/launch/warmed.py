"""A warm pool without torchrun: shims started by hand, and the same script started cold."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

from everstep.launch.warm.nest import Spec
from everstep.launch.warm.pool import Events, Pool
from everstep.launch.warm.rank import WarmRank

SUBJECT = Path(__file__).parent / "subject.py"
LOAD_S = 60.0


@dataclass
class Ended:
    """How a process ended, and what it wrote."""

    code: int
    out: str
    err: str


@dataclass
class Warmed:
    """One script's pool, and what it said."""

    command: Sequence[str]
    environ: dict[str, str]
    cwd: Path
    said: list[str] = field(default_factory=list)
    born: list[WarmRank] = field(default_factory=list)
    ends: list[tuple[int, int, bool]] = field(default_factory=list)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = Pool(self.said.append)
        self.pool.events = Events(
            self.born.append, lambda rank, code, held: self.ends.append((rank.pid, code, held))
        )
        words = ["-u", *self.command]
        environ = {os.fsencode(k): os.fsencode(v) for k, v in self.environ.items()}
        self.pool.start(Spec(tuple(os.fsencode(w) for w in words), environ, str(self.cwd)))

    def warm(self) -> Warmed:
        """Wait until the nursery has loaded."""
        wait_until(f"a nursery; {self.said}", lambda: self.pool.ready or self.said, LOAD_S)
        return self

    def start(
        self, *arguments: str, local_rank: int = 0, command: Sequence[str] = (), **changes: Any
    ) -> subprocess.Popen[str]:
        """Start a shim as torchrun does."""
        return self._popen(str(self.pool.executable), arguments, local_rank, command, changes)

    def start_cold(self, *arguments: str, **changes: Any) -> subprocess.Popen[str]:
        """Start the script as torchrun does without a pool."""
        return self._popen(sys.executable, arguments, 0, (), changes)

    def _popen(
        self,
        python: str,
        arguments: Sequence[str],
        local_rank: int,
        command: Sequence[str],
        changes: dict[str, Any],
    ) -> subprocess.Popen[str]:
        environ = {**self.environ, "LOCAL_RANK": str(local_rank), "RANK": str(local_rank)}
        environ |= changes.pop("environ", {})
        piped: dict[str, Any] = {
            "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
            "cwd": self.cwd, "env": environ,
        }  # fmt: skip
        process = subprocess.Popen(
            [python, "-u", *(command or self.command), *arguments],
            text=True,
            start_new_session=True,
            **(piped | changes),
        )
        self.started.append(process)
        return process

    def both(self, *arguments: str, stdin: str = "", **changes: Any) -> tuple[Ended, Ended]:
        """Run the script warm, then cold; return how both ended."""
        if stdin:
            changes["stdin"] = subprocess.PIPE
        warm = finish(self.start(*arguments, **changes), stdin)
        assert self.said == [], "it started cold"
        return warm, finish(self.start_cold(*arguments, **changes), stdin)

    def close(self) -> None:
        """Close the pool, and end what a failed test has left."""
        self.pool.close()
        for process in self.started:
            with process:  # closes its pipes
                process.kill()


def finish(process: subprocess.Popen[str], stdin: str = "") -> Ended:
    out, err = process.communicate(stdin or None, timeout=60)
    return Ended(process.returncode, out, err)


def ready(process: subprocess.Popen[str]) -> None:
    """Wait until the script says that it is ready."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}

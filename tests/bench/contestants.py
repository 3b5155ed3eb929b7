"""Who is to bring a run back: everstep, or plain torchrun, on the same training script.

Either starts launchers on "nodes" of this machine; each process of a node carries the node's mark
in its environment, so that a node can be frozen as a whole.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from tests.bench.processes import free_port, listens

from everstep.cli.api import Api
from everstep.cli.demo.cluster import Cluster
from everstep.launch import reaper

RUN = "bench"
_MARK = "EVERSTEP_BENCH"


@dataclass(frozen=True, slots=True)
class Shape:
    """How many nodes train with how many ranks each, and how many wait beside them."""

    nodes: int
    ranks: int
    spares: int = 0


class Contestant(Protocol):
    """A run in progress."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...

    def nodes(self) -> list[list[int]]:
        """Return the pids of each node."""
        ...

    def parts(self, at_s: float, /) -> dict[str, float]:
        """Return when, after a fault at `at_s`, what it went through was done, as far as known."""
        ...


class Everstep:
    """A coordinator, and an agent and a launcher on each node."""

    def __init__(self, folder: Path, shape: Shape, config: Path) -> None:
        self._cluster = Cluster(folder)
        self._shape = shape
        self._config = config

    def __enter__(self) -> Self:
        cluster, shape = self._cluster, self._shape
        with contextlib.ExitStack() as stack:
            stack.callback(cluster.close)
            cluster.start_coordinator()
            nodes = [cluster.add_node(f"node{i}") for i in range(shape.nodes + shape.spares)]
            for node in nodes:
                arguments = [f"--nnodes={shape.nodes}:{shape.nodes}", *_script(shape, self._config)]
                cluster.launch(node, RUN, arguments)
            stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._cluster.close()

    def nodes(self) -> list[list[int]]:
        return [node.pids() for node in self._cluster.nodes.values()]

    def parts(self, at_s: float, /) -> dict[str, float]:
        api = Api(self._cluster.url, self._cluster.api_token)
        after = (i for i in api.get("incidents")["incidents"] if i["detected_at_s"] > at_s)
        incident = next((i for i in after if i["committed_at_s"] is not None), None)
        if incident is None:
            return {}
        events = api.get("events", limit=1000)["events"]
        started = [
            e["at_s"]
            for e in events
            if e["fact"] == "RanksUp" and e["generation"] == incident["next_generation"]
        ]
        return {
            "detected_s": incident["detected_at_s"] - at_s,
            "committed_s": incident["committed_at_s"] - at_s,
            "ranks_started_s": max(started, default=at_s) - at_s,
        }


class PlainTorchrun:
    """Launchers alone. One node is torchrun's --standalone; several meet at the first one's."""

    def __init__(self, folder: Path, shape: Shape, config: Path) -> None:
        self._folder = folder
        self._shape = shape
        self._config = config
        self._token = f"{os.getpid()}.{time.monotonic_ns()}"
        self._launchers: list[subprocess.Popen[bytes]] = []
        self._port = free_port()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(self.__exit__)
            self._launch(0)
            end_s = time.monotonic() + 60
            while self._shape.nodes > 1 and not listens(self._port):
                if time.monotonic() > end_s:
                    raise RuntimeError(f"torchrun did not start; see {self._folder}")
                time.sleep(0.05)
            for number in range(1, self._shape.nodes + self._shape.spares):
                self._launch(number)
            stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        reaper.kill_marked(f"{_MARK}={self._token}.")
        for launcher in self._launchers:
            launcher.wait(10)

    def nodes(self) -> list[list[int]]:
        return [reaper.marked(self._mark(i)) for i in range(len(self._launchers))]

    def parts(self, _: float, /) -> dict[str, float]:
        return {}

    def _mark(self, number: int) -> str:
        return f"{_MARK}={self._token}.{number}."

    def _launch(self, number: int) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3"]
        if self._shape.nodes == 1:
            command += ["--standalone"]
        else:
            command += [f"--nnodes={self._shape.nodes}", "--rdzv-backend=c10d", f"--rdzv-id={RUN}"]
            command += [f"--rdzv-endpoint=127.0.0.1:{self._port}", "--local-addr=127.0.0.1"]
        name, _, value = self._mark(number).partition("=")
        # Without it torch 2.13 lets a restarted rank read its predecessor's addresses: it hangs.
        environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", name: value}
        with (self._folder / f"node{number}.log").open("wb") as log:
            launcher = subprocess.Popen(
                [*command, *_script(self._shape, self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **environ},
            )
        self._launchers.append(launcher)


def _script(shape: Shape, config: Path) -> list[str]:
    return [f"--nproc-per-node={shape.ranks}", "-m", "everstep.trainer", "--config", str(config)]


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank as the kernel shows it."""

    number: int
    pid: int
    node: int = field(compare=False)


def ranks(nodes: Sequence[Sequence[int]]) -> list[Rank]:
    """Return the ranks among the pids of each node, lowest first."""
    found = []
    for node, pids in enumerate(nodes):
        for pid in pids:
            number = _rank_of(pid)
            if number is not None:
                found.append(Rank(number, pid, node))
    return sorted(found, key=lambda rank: rank.number)


def _rank_of(pid: int) -> int | None:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        leads = os.getpgid(pid) == pid
    except OSError:
        return None
    numbers = [int(e.removeprefix(b"RANK=")) for e in entries if e.startswith(b"RANK=")]
    return numbers[0] if numbers and leads else None


def freeze(pids: Sequence[int]) -> None:
    """SIGSTOP them all."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)

"""Who is to bring a run back: everstep here, the launchers of others in `peers.launchers`.

Each starts launchers on "nodes" of this machine; a node can be frozen as a whole.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, Self

from everstep.cli.api import Api
from everstep.cli.demo.cluster import Cluster
from everstep.launch import reaper

RUN = "bench"


@dataclass(frozen=True, slots=True)
class Shape:
    """How many nodes train with how many ranks each, and how many wait beside them.

    Where it `shrinks`, those that are left may go on alone. Where it `restarts`, ranks are
    restarted by their launcher, though something cheaper might do.
    """

    nodes: int
    ranks: int
    spares: int = 0
    shrinks: bool = False
    restarts: bool = False


class Contestant(Protocol):
    """A run in progress.

    `cannot` has the figures that it can't have, and why; `same` those that are another one's, as
    it knows no other way; `tuned` what was set or changed for it; `trainer` what the training
    script is configured with for a figure.
    """

    cannot: ClassVar[Mapping[str, str]]
    same: ClassVar[Mapping[str, str]]
    tuned: ClassVar[str]
    trainer: ClassVar[Mapping[str, Mapping[str, float]]]

    def __init__(self, folder: Path, shape: Shape, config: Path) -> None: ...

    @classmethod
    def missing(cls) -> str:
        """Return why it is not there, nothing when it is."""
        ...

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

    cannot: ClassVar[Mapping[str, str]] = {}
    same: ClassVar[Mapping[str, str]] = {}
    tuned: ClassVar[str] = ""
    trainer: ClassVar[Mapping[str, Mapping[str, float]]] = {}

    @classmethod
    def missing(cls) -> str:
        return ""

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
                least = 1 if shape.shrinks else shape.nodes
                arguments = [f"--nnodes={least}:{shape.nodes}", *_script(shape, self._config)]
                environ = {"EVERSTEP_IN_PLACE": "0"} if shape.restarts else {}
                cluster.launch(node, RUN, arguments, environ=environ)
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
        leads = os.getpgid(pid) == pid and not reaper.is_shim(pid)
    except OSError:
        return None
    numbers = [int(e.removeprefix(b"RANK=")) for e in entries if e.startswith(b"RANK=")]
    return numbers[0] if numbers and leads else None


def freeze(pids: Sequence[int]) -> None:
    """SIGSTOP them all."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)

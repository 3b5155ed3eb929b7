"""The faults of the demo: what each does to the cluster, and how one tells that it is over."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from everstep.launch import reaper

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from everstep.cli.demo.cluster import Cluster, Node

Kind = Literal[
    "kill-rank",
    "kill-coordinator",
    "kill-node",
    "kill-agent",
    "freeze-node",
    "cut-agent",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
LAST = "kill-last-node"
CUT_S, AGENT_AWAY_S, COORDINATOR_AWAY_S = 6.0, 3.0, 2.0

WHAT = {
    "kill-rank": "SIGKILL of one rank",
    "kill-coordinator": "SIGKILL of the coordinator, started again after 2 s",
    "kill-node": "SIGKILL of everything on a node, agent included",
    "kill-agent": "SIGKILL of one agent alone, started again after 3 s",
    "freeze-node": "SIGSTOP of everything on a node, thawed when the run has gone on",
    "cut-agent": "an agent's connection cut for 6 s, sockets left open",
    LAST: "SIGKILL of a node with no spare left; it returns later",
}
STOPS_TRAINING = frozenset({"kill-rank", "kill-node", "freeze-node", LAST})
EVICTS = frozenset({"kill-node", "freeze-node", LAST})


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault as it was done: whom it hit, and what is still to be put right again, and when."""

    kind: str
    target: str
    node: str | None
    repair_s: float | None = None
    repair: Callable[[], None] | None = None


def rank_pids(node: Node) -> list[tuple[int, int]]:
    """Return (rank, pid) of each rank that runs on a node, lowest first."""
    found = []
    for pid in node.pids():
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [e.removeprefix(b"RANK=") for e in entries if e.startswith(b"RANK=")]
        if ranks and os.getpgid(pid) == pid and not reaper.is_shim(pid):
            found.append((int(ranks[0]), pid))
    return sorted(found)


def strike(cluster: Cluster, kind: str, members: Sequence[str], rng: random.Random) -> Struck:
    """Do one fault to a random member of the generation that trains now."""
    node = cluster.nodes[rng.choice(list(members))]
    match kind:
        case "kill-rank":
            rank, pid = rng.choice(rank_pids(node))
            os.kill(pid, signal.SIGKILL)
            return Struck(kind, f"{node.name} rank {rank}", node.name)
        case "kill-node" | "kill-last-node":
            cluster.kill_node(node)
            return Struck(kind, node.name, node.name)
        case "freeze-node":
            cluster.freeze(node)
            return Struck(kind, node.name, node.name, None, lambda: cluster.thaw(node))
        case "kill-agent":
            cluster.kill_agent(node)
            return Struck(
                kind, node.name, node.name, AGENT_AWAY_S, lambda: cluster.start_agent(node)
            )
        case "cut-agent":
            cluster.cables.set_cut(node.cable, cut=True)
            return Struck(
                kind,
                node.name,
                node.name,
                CUT_S,
                lambda: cluster.cables.set_cut(node.cable, cut=False),
            )
        case _:
            cluster.kill_coordinator()
            return Struck(kind, "coordinator", None, COORDINATOR_AWAY_S, cluster.start_coordinator)

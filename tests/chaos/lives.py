"""A training run on nodes of this machine, whose steps are read from its ledger as it goes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.runs import rank_pids

from everstep.cli.demo import story
from everstep.cli.demo.cluster import Cluster, Node
from everstep.launch import reaper
from everstep.trainer import ledger

JOB = "chaos"
_POLL_S = 0.05


class LifeError(AssertionError):
    """Something did not come that should have: what, and where the logs are."""


@dataclass
class Life:
    """Our own trainer with `everstep torchrun` on every node of a cluster."""

    cluster: Cluster
    config: Path
    run_dir: Path
    least: int
    most: int
    ranks: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> list[Node]:
        return [*self.cluster.nodes.values()]

    def launch(self, node: Node) -> None:
        """Start a node's launcher, or start it again."""
        self.cluster.launch(
            node,
            JOB,
            [
                f"--nnodes={self.least}:{self.most}",
                f"--nproc-per-node={self.ranks}",
                "-m",
                "everstep.trainer",
                "--config",
                str(self.config),
            ],
            self.environ,
        )

    def launchers_left(self) -> list[Node]:
        """Return the nodes whose launcher runs."""
        return [n for n in self.nodes if any(p.poll() is None for p in n.launchers.values())]

    def over(self) -> bool:
        """Say whether every launcher has ended."""
        return not self.launchers_left()

    def exit_codes(self) -> list[int | None]:
        return [p.poll() for n in self.nodes for p in n.launchers.values()]

    def pids(self) -> list[int]:
        """Return the pids of all ranks."""
        return [pid for node in self.nodes for pid in rank_pids(node)]

    def steps(self) -> list[story.Step]:
        """Return what all ranks of their generation have finished, in order of time."""
        folder = self.run_dir / "ledger"
        return story.finished(ledger.read(folder)) if folder.exists() else []

    def newest(self) -> tuple[int, int]:
        """Return generation and number of the newest step, zeros before the first.

        Of rank 0 alone, and from the newest file alone: this is asked often.
        """
        books = [*(self.run_dir / "ledger").glob("*-r0.jsonl")]
        for path in sorted(books, key=_generation, reverse=True):
            lines = path.read_bytes().count(b"\n") - 1
            if lines > 0:
                return _generation(path), lines
        return 0, 0

    def await_steps(self, after: int, what: str, timeout_s: float = 120, many: int = 2) -> None:
        """Wait for steps of a generation above `after`, or the end of the run."""
        self.wait(lambda: self.newest() >= (after + 1, many) or self.over(), what, timeout_s)

    def wait(self, true: Callable[[], object], what: str, timeout_s: float) -> None:
        """Poll until it is true. Raises LifeError when it does not come."""
        end_s = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > end_s:
                raise LifeError(f"not within {timeout_s:.0f} s: {what}; {self.cluster.folder}")
            time.sleep(_POLL_S)


def kill(pid: int) -> bool:
    """SIGKILL a process; False when it was gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def marked(cluster: Cluster) -> list[int]:
    """Return everything that runs with a cluster's mark."""
    return reaper.marked(f"EVERSTEP_DEMO={cluster.token}")


def _generation(book: Path) -> int:
    return int(book.stem.rsplit("-g", 1)[1].split("-r")[0])

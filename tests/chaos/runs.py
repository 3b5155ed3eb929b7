"""A training run under a seeded storm: ranks, launchers, agents and the coordinator are killed.

What was killed is started again after 1 to 5 s, as a service manager would, except for ranks,
which are everstep's own business. Nothing waits for a good moment: kills fall into starts, first
steps, saves and restarts too.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from everstep.cli.demo.cluster import Cluster, Node
from everstep.cli.demo.training import Recipe, library_bytes
from everstep.launch import reaper
from everstep.trainer.snapshot import compare
from everstep.wire.exit_codes import UNAVAILABLE

THIRTY_SECOND_WAIT = "Unable to shutdown process"
LAYOUTS = ((3, 1), (4, 1), (2, 2))  # nodes, ranks per node
_WEIGHTS = {"rank": 5, "launcher": 2, "agent": 2, "coordinator": 1}


@dataclass(frozen=True)
class Storm:
    """What one seed stands for."""

    seed: int
    nodes: int
    ranks: int
    steps: int
    kills: int

    @classmethod
    def of(cls, seed: int, *, steps: int = 60, kills: int = 7) -> Storm:
        """Return the storm of a seed."""
        nodes, ranks = LAYOUTS[seed % len(LAYOUTS)]
        return cls(seed, nodes, ranks, steps, kills)


@dataclass
class Outcome:
    """What became of a run."""

    storm: Storm
    exit_codes: list[int | None] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    final_step: int = 0
    differences: list[str] = field(default_factory=list)
    waited_thirty_s: bool = False
    left_over: list[int] = field(default_factory=list)
    evicted: int = 0
    took_s: float = 0.0
    trouble: str = ""

    @property
    def good(self) -> bool:
        """Whether everything held that we promise."""
        return (
            not self.trouble
            and set(self.exit_codes) == {0}
            and self.final_step == self.storm.steps
            and not self.differences
            and not self.waited_thirty_s
            and not self.left_over
        )


@dataclass(order=True)
class _Due:
    at: float
    order: int
    what: Callable[[], None] = field(compare=False)


class Weather:
    """Kills at random, starts again, and ends with the job."""

    def __init__(self, cluster: Cluster, storm: Storm, launch: Callable[[Node], None]) -> None:
        self._cluster = cluster
        self._storm = storm
        self._launch = launch
        self._rng = random.Random(storm.seed)
        self._due: list[_Due] = []
        self._order = itertools.count()
        self.killed: Counter[str] = Counter()

    def blow(self, timeout_s: float) -> str:
        """Run until every launcher has ended; return what went wrong, "" for nothing."""
        at = 2.0
        for _ in range(self._storm.kills):
            at += self._rng.expovariate(1 / 3.5)
            self._later(at, self._strike)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            while self._due and self._due[0].at <= time.monotonic():
                heapq.heappop(self._due).what()
            self._start_again()
            if not self._due and all(p.poll() is not None for p in self._launchers()):
                return ""
            time.sleep(0.02)
        return f"not over within {timeout_s:.0f} s"

    def _start_again(self) -> None:
        """Do what a service manager does about 69: no agent was there, so try again."""
        for node in self._cluster.nodes.values():
            for run_id, launcher in list(node.launchers.items()):
                if launcher.poll() == UNAVAILABLE:
                    del node.launchers[run_id]
                    self._later(self._rng.uniform(1, 5), partial(self._launch, node))

    def _later(self, after_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, _Due(time.monotonic() + after_s, next(self._order), what))

    def _launchers(self) -> list[subprocess.Popen[bytes]]:
        return [p for node in self._cluster.nodes.values() for p in node.launchers.values()]

    def _strike(self) -> None:
        kind = self._rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        node = self._rng.choice(list(self._cluster.nodes.values()))
        again_s = self._rng.uniform(1, 5)
        if all(p.poll() is not None for p in self._launchers()):
            return
        if kind == "rank":
            self._kill_rank(node)
        elif kind == "launcher":
            self._kill_launcher(node, again_s)
        elif kind == "agent":
            self._kill_agent(node, again_s)
        else:
            self._kill_coordinator(again_s)

    def _kill_rank(self, node: Node) -> None:
        ranks = rank_pids(node)
        if ranks:
            os.kill(self._rng.choice(ranks), signal.SIGKILL)
            self.killed["rank"] += 1

    def _kill_agent(self, node: Node, again_s: float) -> None:
        if node.agent is not None and node.agent.poll() is None:
            self._cluster.kill_agent(node)
            self.killed["agent"] += 1
            self._later(again_s, lambda: self._cluster.start_agent(node))

    def _kill_coordinator(self, again_s: float) -> None:
        coordinator = self._cluster.coordinator
        if coordinator is not None and coordinator.poll() is None:
            self._cluster.kill_coordinator()
            self.killed["coordinator"] += 1
            self._later(again_s, self._cluster.start_coordinator)

    def _kill_launcher(self, node: Node, again_s: float) -> None:
        for launcher in node.launchers.values():
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()
                self.killed["launcher"] += 1
                self._later(again_s, lambda: self._launch(node))


def rank_pids(node: Node) -> list[int]:
    """Return the pids of a node's ranks: its processes with a RANK in their environment."""
    return [pid for pid in node.pids() if "RANK" in environment(pid) and not reaper.is_shim(pid)]


def environment(pid: int) -> dict[str, str]:
    """Return a process's environment, empty when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if entry)
    return {k.decode(errors="replace"): v.decode(errors="replace") for k, _, v in pairs}


def undisturbed(folder: Path, data: Path, storm: Storm) -> Path:
    """Return the final snapshot of the same training without everstep, made once per layout."""
    world = storm.nodes * storm.ranks
    recipe = Recipe(
        folder / f"undisturbed-{world}-{storm.steps}", data, storm.steps, seed=1, micro_batch=1
    )
    if (done := compare.newest(recipe.run_dir / "snapshots")) is not None:
        return done
    config = recipe.write()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={world}", "-m", "everstep.trainer", "--config", str(config),
    ]  # fmt: skip
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (folder / f"undisturbed-{world}.log").open("wb") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env=environ, timeout=600)
    found = compare.newest(recipe.run_dir / "snapshots")
    if found is None:
        raise AssertionError(f"the undisturbed run left no snapshot: see {folder}")
    return found


def weather(storm: Storm, folder: Path, *, timeout_s: float = 420) -> Outcome:
    """Run one storm and say what became of it; logs stay in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder.parent / "library.bin"
    if not data.exists():
        library_bytes(data)
    expected = undisturbed(folder.parent, data, storm)
    recipe = Recipe(folder / "run", data, storm.steps, seed=1, snapshot_every=5, micro_batch=1)
    config = recipe.write()
    outcome = Outcome(storm)
    start = time.monotonic()
    with Cluster(folder) as cluster:
        cluster.start_coordinator()
        nodes = [cluster.add_node(f"node{i + 1}") for i in range(storm.nodes)]

        def launch(node: Node) -> None:
            cluster.launch(
                node,
                "storm",
                [
                    f"--nnodes={storm.nodes}:{storm.nodes}",
                    f"--nproc-per-node={storm.ranks}",
                    "-m",
                    "everstep.trainer",
                    "--config",
                    str(config),
                ],
                await_agent=False,
            )

        for node in nodes:
            launch(node)
        storming = Weather(cluster, storm, launch)
        outcome.trouble = storming.blow(timeout_s)
        outcome.killed = storming.killed
        outcome.exit_codes = [p.poll() for n in nodes for p in n.launchers.values()]
        outcome.left_over = [p for n in nodes for p in rank_pids(n)]
    outcome.took_s = time.monotonic() - start
    logs = [p.read_text(errors="replace") for p in (folder / "logs").glob("*.log")]
    outcome.waited_thirty_s = any(THIRTY_SECOND_WAIT in text for text in logs)
    final = compare.newest(recipe.run_dir / "snapshots")
    if final is not None:
        outcome.final_step = int(final.name[1:7])
        if outcome.final_step == storm.steps:
            outcome.differences = compare.differences(final, expected)
    leftovers = reaper.marked(f"EVERSTEP_DEMO={cluster.token}")
    outcome.left_over += leftovers
    return outcome

"""Launchers of others that bring a run back, each driven as its makers mean it to be, and tuned.

Nodes are launchers on this machine. Each process of a node carries the node's mark in its
environment, so that a node can be frozen as a whole and nothing is left behind. torchrun, NVRx and
DLRover run everstep's own training script, with its snapshots on disk; what they can't do with it
is said where it is left out.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import ClassVar, Self

from tests.bench.contestants import RUN, Shape
from tests.bench.peers.leftovers import swept
from tests.bench.peers.venvs import PEERS
from tests.bench.processes import listens

import everstep
from everstep.cli.demo.ports import free_port
from everstep.launch import reaper

HERE = Path(__file__).parent
_MARK = "EVERSTEP_BENCH"
_START_S, _END_S = 60.0, 10.0
_RANK_FIGURES = (
    "rank_kill_all_s",
    "rank_kill_restart_s",
    "rank_kill_survivor_s",
    "rank_stop_all_s",
    "rank_stop_survivor_s",
)
HANG_S = 5.0
"""Timeout of the training's process group where a peer has nothing else to notice a hang with."""


class Launchers(ABC):
    """A launcher per node and spare, and whatever they meet at."""

    cannot: ClassVar[Mapping[str, str]] = {}
    same: ClassVar[Mapping[str, str]] = {}
    tuned: ClassVar[str] = ""
    trainer: ClassVar[Mapping[str, Mapping[str, float]]] = {}

    def __init__(self, folder: Path, shape: Shape, config: Path) -> None:
        self.folder = folder
        self.shape = shape
        self.config = config
        self.port = free_port()
        self._token = f"{os.getpid()}.{time.monotonic_ns()}"
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._others: list[subprocess.Popen[bytes]] = []
        self._environ: Mapping[str, str] = {}
        self._exit = contextlib.ExitStack()

    @classmethod
    def missing(cls) -> str:
        """Return why it is not there, nothing when it is."""
        return ""

    @abstractmethod
    def command(self, node: int) -> list[str]:
        """Return what a node runs."""

    def environ(self, node: int) -> dict[str, str]:
        """Return what a node's environment has besides."""
        del node
        return {}

    def prepare(self) -> None:  # noqa: B027  most need nothing
        """Start what must be there before any node."""

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(self._reap)
            self._environ = stack.enter_context(swept(f"{_MARK}={self._token}.", self.job))
            self.prepare()
            for node in range(self.shape.nodes + self.shape.spares):
                command, environ = self.command(node), self.environ(node)
                self._nodes.append(self._start(command, f"node{node}", f"{node}.", environ))
                if node == 0 and self.shape.nodes > 1:
                    self.wait_for_port()
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._exit.close()

    def nodes(self) -> list[list[int]]:
        """Return the pids of each node."""
        mark = f"{_MARK}={self._token}"
        return [reaper.marked(f"{mark}.{i}.") for i in range(len(self._nodes))]

    def parts(self, _: float, /) -> dict[str, float]:
        """Nothing more is known of others than when they step again."""
        return {}

    def start_other(self, command: list[str], name: str) -> None:
        """Start a process that belongs to no node."""
        self._others.append(self._start(command, name, name, {}))

    def wait_for_port(self) -> None:
        """Wait until somebody listens where the nodes meet. Raises RuntimeError after a minute."""
        end_s = time.monotonic() + _START_S
        while not listens(self.port):
            if time.monotonic() > end_s:
                raise RuntimeError(f"{type(self).__name__} did not start; see {self.folder}")
            time.sleep(0.05)

    @property
    def job(self) -> str:
        """A name that no other run has."""
        return f"{RUN}-{self._token.replace('.', '-')}"

    def _reap(self) -> None:
        for process in (*self._nodes, *self._others):
            process.wait(_END_S)

    def _start(
        self, command: list[str], name: str, of: str, environ: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        mark = {_MARK: f"{self._token}.{of}"}
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self._environ, **environ, **mark},
            )


class Restarting(Launchers):
    """One that starts all ranks anew after any fault, on everstep's own training script."""

    cannot: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "rank_kill_survivor_s",
            "rank_stop_survivor_s",
            "one_node_rank_kill_survivor_s",
            "one_node_rank_stop_survivor_s",
        ),
        "a fault ends all ranks",
    )
    same: ClassVar[Mapping[str, str]] = {
        "rank_kill_all_s": "rank_kill_restart_s",
        "one_node_rank_kill_all_s": "one_node_rank_kill_restart_s",
    }

    def script(self) -> list[str]:
        """Return everstep's training script."""
        return ["-m", "everstep.trainer", "--config", str(self.config)]


class Torchrun(Restarting):
    """Plain torchrun. One node is its --standalone; several meet at the first one's store."""

    tuned: ClassVar[str] = (
        "a store per attempt (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1): with torch 2.13's shared one "
        "a restart can hang for ever; rendezvous keep-alive every second; for stopped ranks and "
        f"frozen nodes a process-group timeout of {HANG_S:.0f} s, else it would notice after 600"
    )
    trainer: ClassVar[Mapping[str, Mapping[str, float]]] = {
        "rank_stop_all_s": {"process_group_timeout_s": HANG_S},
        "one_node_rank_stop_all_s": {"process_group_timeout_s": HANG_S},
        "node_freeze_s": {"process_group_timeout_s": HANG_S},
    }

    def command(self, node: int) -> list[str]:
        del node
        command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3"]
        command += [f"--nproc-per-node={self.shape.ranks}"]
        if self.shape.nodes == 1:
            command += ["--standalone"]
        else:
            command += [f"--nnodes={self.shape.nodes}", "--rdzv-backend=c10d", f"--rdzv-id={RUN}"]
            command += [f"--rdzv-endpoint=127.0.0.1:{self.port}", "--local-addr=127.0.0.1"]
            command += ["--rdzv-conf=keep_alive_interval=1"]
        return [*command, *self.script()]

    def environ(self, node: int) -> dict[str, str]:
        del node
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class InVenv(Launchers):
    """One that lives in a venv of its own, and there finds everstep's training script."""

    peer: ClassVar[str]

    @classmethod
    def missing(cls) -> str:
        return PEERS[cls.peer].missing()

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(PEERS[self.peer].python)

    def environ(self, node: int) -> dict[str, str]:
        return {**super().environ(node), "PYTHONPATH": ":".join(self._everstep())}

    def _everstep(self) -> list[str]:
        """Return the code that runs here, and the folder where its entry points are found."""
        entries = self.folder / "entry-points"
        entries.mkdir(exist_ok=True)
        installed = distribution("everstep")
        name = f"everstep-{installed.version}.dist-info"
        if not (entries / name).exists():
            (entries / name).symlink_to(str(installed.locate_file(name)))
        return [*(str(Path(part).parent) for part in everstep.__path__), str(entries)]


class Nvrx(InVenv, Restarting):
    """NVRx's ft_launcher, with a heartbeat from each step and surplus nodes as its hot spares."""

    peer: ClassVar[str] = "nvrx"
    tuned: ClassVar[str] = (
        "wheel retagged (without its CUPTI module); a heartbeat per step, timeout 1 s (30 s before "
        "the first), checked every 0.1 s; monitor interval 0.05 s; no wait for GPU memory to be "
        "given back; made for CUDA and NCCL, not for this"
    )
    _OPTIONS: ClassVar[tuple[str, ...]] = (
        "--monitor-interval=0.05",
        "--max-restarts=3",
        "--ft-workload-check-interval=0.1",
        "--ft-initial-rank-heartbeat-timeout=30",
        "--ft-rank-heartbeat-timeout=1",
        "--ft-gpu-memory-reclaim-timeout=0",
    )

    def command(self, node: int) -> list[str]:
        shape = self.shape
        launcher = PEERS[self.peer].folder / "bin" / "ft_launcher"
        return [
            str(launcher),
            *self._OPTIONS,
            f"--nnodes={shape.nodes}:{shape.nodes + shape.spares}",
            f"--nproc-per-node={shape.ranks}",
            "--rdzv-backend=c10d",
            f"--rdzv-id={RUN}",
            f"--rdzv-endpoint=127.0.0.1:{self.port}",
            f"--rdzv-conf=is_host={int(node == 0)}",
            "--local-addr=127.0.0.1",
            str(HERE / "train_nvrx.py"),
            *self.script()[2:],
        ]

    def environ(self, node: int) -> dict[str, str]:
        own = {"NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "1", "GROUP_RANK": str(node)}
        return {**super().environ(node), **own}


class Dlrover(InVenv, Restarting):
    """dlrover-run, with DLRover's local master beside the nodes."""

    peer: ClassVar[str] = "dlrover"
    cannot: ClassVar[Mapping[str, str]] = {
        **Restarting.cannot,
        "node_freeze_s": (
            "its local master has no spares: a third node that joins breaks up the rendezvous of "
            "the other two. Replacing nodes is for its master on Kubernetes, after 600 s without a "
            "heartbeat"
        ),
    }
    tuned: ClassVar[str] = (
        "monitor interval 0.05 s; one argument added that torch 2.13 wants of its launcher; for "
        f"stopped ranks a process-group timeout of {HANG_S:.0f} s, as it looks for hangs after 2 "
        "minutes at the earliest. Its nodes look at their rendezvous every 5 s, which no option "
        "changes"
    )
    trainer: ClassVar[Mapping[str, Mapping[str, float]]] = Torchrun.trainer

    def prepare(self) -> None:
        master = ["-m", "dlrover.python.master.main", f"--port={self.port}", "--platform=local"]
        jobs = [f"--node_num={self.shape.nodes}", f"--job_name={self.job}"]
        self.start_other([self.python, *master, *jobs], "master")
        self.wait_for_port()

    def command(self, node: int) -> list[str]:
        del node
        return [
            self.python,
            str(HERE / "dlrover_run.py"),
            f"--nnodes={self.shape.nodes}",
            f"--nproc_per_node={self.shape.ranks}",
            "--max_restarts=3",
            "--monitor-interval=0.05",
            *self.script(),
        ]

    def environ(self, node: int) -> dict[str, str]:
        own = {
            "DLROVER_MASTER_ADDR": f"127.0.0.1:{self.port}",
            "NODE_RANK": str(node),
            "NODE_ID": str(node),
            "NODE_NUM": str(self.shape.nodes),
        }
        return {**super().environ(node), **own}


class Torchft(InVenv):
    """torchft: a node is a replica group under a torchrun of its own, all meet at a lighthouse."""

    peer: ClassVar[str] = "torchft"
    cannot: ClassVar[Mapping[str, str]] = {
        "rank_kill_restart_s": "survivors go on by design",
        "rank_stop_all_s": "the others go on without it; nobody ends a stopped replica",
        **dict.fromkeys(
            (f"one_node_{name}" for name in _RANK_FIGURES),
            "it brings back whole replica groups: a single one is plain torchrun",
        ),
    }
    tuned: ClassVar[str] = (
        "a script of its own (train_torchft.py: same model, batch and data; state from peers, a "
        "checkpoint every 5 steps); heartbeat timeout 300 ms, join timeout 1 s, tick 10 ms, "
        "process-group timeout 1 s; gradients in one manager.allreduce, as its DDP wrapper loses "
        "the survivor with torch 2.13. Its rank_kill_all_s is not the others': the survivor has "
        "gone on since rank_kill_survivor_s, alone"
    )

    def prepare(self) -> None:
        lighthouse = str(PEERS[self.peer].folder / "bin" / "torchft_lighthouse")
        times = ["--heartbeat_timeout_ms=300", "--join_timeout_ms=1000", "--quorum_tick_ms=10"]
        address = f"--bind=127.0.0.1:{self.port}"
        # With a spare the number of replicas is fixed; else those that are left go on.
        least = self.shape.nodes if self.shape.spares else 1
        self.start_other([lighthouse, f"--min_replicas={least}", address, *times], "lighthouse")
        self.wait_for_port()

    def command(self, node: int) -> list[str]:
        launcher = [self.python, "-m", "torch.distributed.run", "--standalone", "--max-restarts=3"]
        script = [str(HERE / "train_torchft.py"), "--config", str(self.config)]
        group = [f"--group={node}", f"--groups={self.shape.nodes}"]
        fixed = ["--fixed"] if self.shape.spares else []
        return [*launcher, f"--nproc-per-node={self.shape.ranks}", *script, *group, *fixed]

    def environ(self, node: int) -> dict[str, str]:
        own = {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}",
            # Its replicas would ask a proxy for their peers on this machine.
            "NO_PROXY": "*",
            "no_proxy": "*",
        }
        return {**super().environ(node), **own}


LAUNCHERS: dict[str, type[Launchers]] = {
    "torchrun": Torchrun,
    "nvrx": Nvrx,
    "dlrover": Dlrover,
    "torchft": Torchft,
}

"""A cluster on one machine: a coordinator and nodes, each with an agent and a launcher.

Every process of a node, ranks and their children included, carries a mark in its environment, so
that a node can be killed, frozen and thawed as a whole, as a power cut or a hung kernel would.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from everstep.cli.demo.ports import free_port
from everstep.cli.demo.wire_cut import Cable, Cables
from everstep.launch import reaper
from everstep.sdk.errors import EverstepError
from everstep.wire.folder import private_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_MARK = "EVERSTEP_DEMO"
_ROUNDS = 5
_LONGEST_PATH = "a-name-of-a-node/everstep-12345678/writer.sock"


class ClusterError(EverstepError):
    """The cluster could not be started; the text names the log to read."""


@dataclass
class Node:
    """One node: its folder, its mark, its cable to the coordinator, and what runs on it.

    `extra` are further lines of its agent's table.
    """

    name: str
    folder: Path
    mark: str
    cable: Cable
    agent: subprocess.Popen[bytes] | None = None
    launchers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    extra: str = ""

    @property
    def socket(self) -> Path:
        """The agent's socket."""
        return self.folder / "agent.sock"

    def pids(self) -> list[int]:
        """Every process of this node."""
        return reaper.marked(self.mark)


@dataclass
class Cluster:
    """Everything that the demo and the chaos tests start; `close` leaves nothing behind."""

    folder: Path
    token: str = field(default_factory=lambda: secrets.token_hex(4))
    nodes: dict[str, Node] = field(default_factory=dict)
    coordinator: subprocess.Popen[bytes] | None = None
    port: int = 0
    api_token: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = private_folder(_LONGEST_PATH)
        self.cables = Cables()
        self._coordinator_extra = ""
        self.port = self.port or free_port()
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, f"{_MARK}={self.token}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def url(self) -> str:
        """Where the coordinator's HTTP API is."""
        return f"http://127.0.0.1:{self.port}"

    def start_coordinator(self, extra: str | None = None) -> None:
        """Start the coordinator, or start it again after it was killed.

        `extra` are further lines of its table; they hold for later starts too.
        """
        self._coordinator_extra = self._coordinator_extra if extra is None else extra
        config = self.run / "coordinator.toml"
        config.write_text(
            f'[coordinator]\nlisten = "127.0.0.1:{self.port}"\ntoken = "{self.api_token}"\n'
            f'state_dir = "{self.run / "state"}"\n{self._coordinator_extra}'
        )
        self.coordinator = self._spawn(
            ["coordinator", "--config", str(config)], "coordinator", f"{self.token}.coordinator"
        )
        self._await_port(self.port, "coordinator")

    def add_node(self, name: str, extra: str = "") -> Node:
        """Make a node and start its agent; `extra` are further lines of its table."""
        folder = self.run / name
        folder.mkdir()
        cable = self.cables.lay(("127.0.0.1", self.port))
        node = Node(name, folder, f"{_MARK}={self.token}.{name}.", cable, extra=extra)
        self.nodes[name] = node
        self.start_agent(node)
        return node

    def start_agent(self, node: Node) -> None:
        """Start a node's agent, or start it again."""
        host, port = node.cable.address
        config = node.folder / "agent.toml"
        config.write_text(
            f'[agent]\nnode = "{node.name}"\nsocket = "{node.socket}"\n'
            f'listen = "127.0.0.1:0"\ncoordinators = ["{host}:{port}"]\n'
            f'address = "127.0.0.1"\ntoken = "{self.api_token}"\n{node.extra}'
        )
        node.agent = self._spawn(
            ["agent", "--config", str(config)], f"{node.name}-agent", f"{self.token}.{node.name}.a"
        )

    def launch(
        self,
        node: Node,
        run_id: str,
        arguments: Sequence[str],
        environ: Mapping[str, str] = {},
        *,
        await_agent: bool = True,
    ) -> subprocess.Popen[bytes]:
        """Start torchrun on a node. `arguments` follow `everstep torchrun`.

        With `await_agent` off it is started at once and leaves with 69 when no agent is there.
        """
        if await_agent:
            self._await_socket(node)
        process = self._spawn(
            ["torchrun", f"--rdzv-id={run_id}", "--monitor-interval=0.1", *arguments],
            f"{node.name}-{run_id}",
            f"{self.token}.{node.name}.l",
            {
                "EVERSTEP_SOCKET": str(node.socket),
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(node.folder),  # what killed launchers leave goes with the cluster
                **environ,
            },
        )
        node.launchers[run_id] = process
        return process

    def kill_node(self, node: Node) -> None:
        """SIGKILL everything on a node at once, as a power cut would."""
        self._signal(node, signal.SIGKILL)
        for process in [*node.launchers.values(), *filter(None, [node.agent])]:
            process.wait(10)

    def freeze(self, node: Node) -> None:
        """SIGSTOP everything on a node: its sockets stay open and nobody answers."""
        self._signal(node, signal.SIGSTOP)

    def thaw(self, node: Node) -> None:
        """Let a frozen node run on."""
        self._signal(node, signal.SIGCONT)

    def kill_agent(self, node: Node) -> None:
        """SIGKILL a node's agent alone."""
        if node.agent is not None:
            node.agent.kill()
            node.agent.wait(10)

    def kill_coordinator(self) -> None:
        """SIGKILL the coordinator."""
        if self.coordinator is not None:
            self.coordinator.kill()
            self.coordinator.wait(10)

    def log(self, name: str) -> Path:
        """Where a process's output goes, e.g. `node1-agent`."""
        return self.folder / "logs" / f"{name}.log"

    def close(self) -> None:
        """End every process, socket and folder of the cluster; the logs stay."""
        everything = f"{_MARK}={self.token}"
        for pid in reaper.marked(everything):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reaper.kill_marked(everything)
        for process in self._processes():
            process.wait(10)
        self.cables.close()
        if self._reaper.stdin is not None:
            self._reaper.stdin.close()
        self._reaper.wait(10)
        shutil.rmtree(self.run, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _processes(self) -> Iterable[subprocess.Popen[bytes]]:
        for node in self.nodes.values():
            yield from node.launchers.values()
            if node.agent is not None:
                yield node.agent
        if self.coordinator is not None:
            yield self.coordinator

    def _signal(self, node: Node, number: signal.Signals) -> None:
        # Ranks may be forked meanwhile: look again until a round finds nobody new.
        done: set[int] = set()
        for _ in range(_ROUNDS):
            new = set(node.pids()) - done
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if not new:
                return
            done |= new

    def _spawn(
        self,
        arguments: Sequence[str],
        name: str,
        mark: str,
        environ: Mapping[str, str] = {},
    ) -> subprocess.Popen[bytes]:
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "everstep.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, _MARK: mark, **environ},
            )

    def _await_port(self, port: int, name: str) -> None:
        def answers() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        self._await(answers, f"{name} does not answer on port {port}", name)

    def _await_socket(self, node: Node) -> None:
        def answers() -> bool:
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe,
            ):
                probe.connect(str(node.socket))
                return True
            return False

        self._await(answers, f"the agent of {node.name} does not answer", f"{node.name}-agent")

    def _await(self, true: Callable[[], bool], what: str, name: str) -> None:
        end = time.monotonic() + 60
        while not true():
            if time.monotonic() > end:
                raise ClusterError(f"{what}; see {self.log(name)}")
            time.sleep(0.05)

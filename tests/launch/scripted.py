"""A scripted agent and coordinator in one thread: real sockets, plans made by the test."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from everstep.wire.codec import Decoder, Frames, frame
from everstep.wire.messages import (
    Ack,
    BindStore,
    ClientMessage,
    Committed,
    Evicted,
    Hello,
    JobOver,
    Join,
    Joined,
    Link,
    Member,
    Message,
    Numbered,
    Plan,
    StoreBound,
    Welcome,
)

M = TypeVar("M", bound=Message)
DEADLINE_S = 60.0
NONCE = "n0nce"


class ScriptedAgent:
    """The agent of one node; `got` holds every launcher message in order."""

    def __init__(self, node: str, folder: Path) -> None:
        self.node = node
        self.path = folder / f"{node}.sock"
        self.got: list[ClientMessage] = []
        self._news: queue.Queue[ClientMessage] = queue.Queue()
        self._launcher: socket.socket | None = None
        self._plan: Plan | None = None
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self.path))
        self._server.listen()
        self._closing = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        decoder: Decoder[ClientMessage | Numbered] = Decoder(ClientMessage | Numbered)
        frames = Frames()
        with client:
            while True:
                try:
                    data = client.recv(65536)
                    for body in frames.feed(data):
                        self._take(client, decoder.decode(body))
                except OSError:
                    return
                if not data:
                    return

    def _take(self, client: socket.socket, message: ClientMessage | Numbered) -> None:
        if isinstance(message, Numbered):
            client.sendall(frame(Ack(seq=message.seq)))
            message = message.body
        self.got.append(message)
        if isinstance(message, Hello):
            client.sendall(frame(Welcome(node=self.node)) + frame(Link(up=True)))
        if isinstance(message, Join):
            self._launcher = client
            self.say(Joined(nonce=NONCE, node=self.node, address="127.0.0.1"))
            if self._plan is not None:
                self.say(Committed(plan=self._plan))
        self._news.put(message)

    def say(self, message: Message) -> None:
        if isinstance(message, Committed):
            self._plan = message.plan
        if self._launcher is not None:
            try:
                self._launcher.sendall(frame(message))
            except OSError:
                self._launcher = None

    def expect(self, kind: type[M]) -> M:
        """Return the next message of this kind, skipping others."""
        end = time.monotonic() + DEADLINE_S
        while True:
            message = self._news.get(timeout=max(0.1, end - time.monotonic()))
            if isinstance(message, kind):
                return message

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(m, kind) for m in self.got)

    def hang_up(self) -> None:
        if self._launcher is not None:
            self._launcher.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.hang_up() if self._launcher is not None and self._launcher.fileno() >= 0 else None


@dataclass
class Launcher:
    """A real torchrun and where its output goes."""

    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Cluster:
    """Nodes with scripted agents; launches torchruns and commits plans."""

    folder: Path
    agents: dict[str, ScriptedAgent] = field(default_factory=dict)
    launchers: list[Launcher] = field(default_factory=list)

    def node(self, name: str) -> ScriptedAgent:
        self.agents[name] = ScriptedAgent(name, self.folder)
        return self.agents[name]

    def torchrun(self, node: str, script: Path, *args: str, nproc: int = 1) -> Launcher:
        log = self.folder / f"{node}-{len(self.launchers)}.log"
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "EVERSTEP_SOCKET": str(self.agents[node].path),
            "TMPDIR": str(self.folder),
        }
        command = [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes=1:4", f"--nproc-per-node={nproc}", "--rdzv-backend=everstep",
            "--rdzv-id=scripted", "--max-restarts=1000", "--logs-specs=everstep",
            *args, str(script),
        ]  # fmt: skip
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environ, start_new_session=True
            )
        self.launchers.append(Launcher(process, log))
        return self.launchers[-1]

    def commit(
        self, generation: int, members: list[str], *, nproc: int = 1, evicted: tuple[str, ...] = ()
    ) -> Plan:
        """Propose to the first member, then commit to every node, as the coordinator does."""
        first = self.agents[members[0]]
        first.say(BindStore(nonce=NONCE, generation=generation))
        while (bound := first.expect(StoreBound)).generation != generation:
            pass
        plan = Plan(
            job=NONCE,
            run_id="scripted",
            generation=generation,
            epoch=1,
            members=[Member(node=m, address="127.0.0.1", local_world_size=nproc) for m in members],
            spares=[n for n in self.agents if n not in members],
            evicted=[Evicted(node=n, why="a test") for n in evicted],
            store_address=bound.address,
            store_port=bound.port,
            resume=[f"s{generation:06d}-g{generation}"],
            why="the test says so",
        )
        for agent in self.agents.values():
            agent.say(Committed(plan=plan))
        return plan

    def over(self, exit_code: int = 0, why: str = "done", error: str | None = None) -> None:
        outcome: Literal["done", "failed"] = "done" if exit_code == 0 else "failed"
        for agent in self.agents.values():
            agent.say(
                JobOver(nonce=NONCE, outcome=outcome, exit_code=exit_code, why=why, error=error)
            )

    def close(self) -> None:
        for launcher in self.launchers:
            if launcher.process.poll() is None:
                os.killpg(launcher.process.pid, signal.SIGCONT)
                launcher.kill()
        for agent in self.agents.values():
            agent.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def new_cluster() -> Cluster:
    return Cluster(Path(tempfile.mkdtemp(prefix="evl-", dir="/tmp")))


def alive(pid: int) -> bool:
    """Say whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"

"""Many agents against one coordinator process: what a heartbeat costs, and how late its answer is.

    python -m tests.coordinator.load --agents 1000 --seconds 20

The agents are bare protocols in this process: no WebSocket library, so that it is the coordinator
that is measured. All of them belong to one job, with `--ranks` ranks each.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import uvloop

from everstep.wire.codec import Decoder, encode
from everstep.wire.messages import (
    AgentHello,
    AgentToCoordinator,
    BindStore,
    Committed,
    CoordinatorToAgent,
    CoordinatorWelcome,
    FromClient,
    Heartbeat,
    HeartbeatReply,
    Join,
    Joined,
    Peer,
    RankProgress,
    RanksStarted,
    StoreBound,
    ToClient,
)

_decoder: Decoder[CoordinatorToAgent] = Decoder(CoordinatorToAgent)


@dataclass
class Tally:
    """What all agents saw."""

    welcomed: int = 0
    committed: int = 0
    sent: int = 0
    answered: int = 0
    late_s: list[float] = field(default_factory=list)


class Agent(asyncio.Protocol):
    """One agent with one launcher; it beats once a second."""

    def __init__(self, number: int, agents: int, ranks: int, tally: Tally) -> None:
        self._number = number
        self._agents = agents
        self._ranks = ranks
        self._tally = tally
        self._buffer = b""
        self._open = False
        self._sent_s: dict[int, float] = {}
        self._seq = 0
        self._nonce = ""
        self._generation = 0
        self._peer = Peer(pid=number + 1, uid=1000, gid=1000, start_ticks=1, boot_id="boot")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        key = base64.b64encode(os.urandom(16)).decode()
        self._transport.write(
            (
                "GET /v1/agent HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
                "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                f"Sec-WebSocket-Key: {key}\r\n\r\n"
            ).encode()
        )

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._open:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            assert b" 101 " in head, head
            self._open, self._buffer = True, rest
            self._send(
                AgentHello(
                    node=f"n{self._number}",
                    epoch=str(self._number),
                    machine_id=f"m{self._number}",
                    boot_id="boot",
                    address="127.0.0.1",
                )
            )
        for body in self._frames():
            self._hear(_decoder.decode(body))

    def _frames(self) -> list[bytes]:
        found = []
        while len(self._buffer) >= 2:
            size, at = self._buffer[1] & 0x7F, 2
            if size == 126:
                (size,), at = struct.unpack_from(">H", self._buffer, 2), 4
            elif size == 127:
                (size,), at = struct.unpack_from(">Q", self._buffer, 2), 10
            if len(self._buffer) < at + size:
                break
            found.append(self._buffer[at : at + size])
            self._buffer = self._buffer[at + size :]
        return found

    def _send(self, message: AgentToCoordinator) -> None:
        body = encode(message)
        size = len(body)
        head = (
            struct.pack(">BB", 0x82, 0x80 | size)
            if size < 126
            else struct.pack(">BBH", 0x82, 0xFE, size)
        )
        self._transport.write(head + b"\0\0\0\0" + body)  # a mask of zeros changes nothing

    def _say(self, body: Any) -> None:
        self._send(FromClient(client="c", peer=self._peer, body=body))

    def _hear(self, message: CoordinatorToAgent) -> None:
        match message:
            case HeartbeatReply(seq=seq):
                self._tally.answered += 1
                self._tally.late_s.append(time.perf_counter() - self._sent_s.pop(seq))
            case CoordinatorWelcome():
                self._tally.welcomed += 1
                asyncio.get_running_loop().call_later(random.random(), self.beat)
            case ToClient(body=Joined(nonce=nonce)):
                self._nonce = nonce
            case ToClient(body=BindStore(nonce=nonce, generation=generation)):
                self._say(
                    StoreBound(nonce=nonce, generation=generation, address="127.0.0.1", port=1)
                )
            case ToClient(body=Committed(plan=plan)):
                self._tally.committed += 1
                self._generation = plan.generation
                self._say(
                    RanksStarted(
                        nonce=plan.job, generation=plan.generation, pids=[1], ranks=[self._number]
                    )
                )
            case _:
                pass

    def join(self) -> None:
        self._say(
            Join(
                run_id="load",
                nonce=None,
                min_nodes=self._agents,
                max_nodes=self._agents,
                local_world_size=self._ranks,
            )
        )

    def beat(self) -> None:
        self._seq += 1
        self._tally.sent += 1
        self._sent_s[self._seq] = time.perf_counter()
        pages = [
            RankProgress(
                job=self._nonce,
                generation=self._generation,
                rank=self._number * self._ranks + i,
                pid=i,
                phase="step",
                step=self._seq,
                standing_s=0.1,
                p99_step_s=0.3,
                loss=2.5,
                grad_norm=1.0,
                tokens=4096,
                lr=1e-4,
                step_s=0.3,
                uid=1000,
            )
            for i in range(self._ranks if self._generation else 0)
        ]
        self._send(
            Heartbeat(
                seq=self._seq, sent_at_s=time.time(), ranks=pages, offset_s=0.0, error_s=0.001
            )
        )
        asyncio.get_running_loop().call_later(1.0, self.beat)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)] if values else float("nan")


async def measure(port: int, pid: int, agents: int, ranks: int, seconds: float) -> dict[str, Any]:
    """Connect, form one job of all agents, and look at `seconds` of steady heartbeats."""
    loop = asyncio.get_running_loop()
    tally, found = Tally(), []
    began_s = time.monotonic()
    for number in range(agents):
        agent = Agent(number, agents, ranks, tally)
        await loop.create_connection(lambda a=agent: a, "127.0.0.1", port)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
        found.append(agent)
    await _reach(lambda: tally.welcomed == agents)
    connected_s = time.monotonic() - began_s
    began_s = time.monotonic()
    for agent in found:
        agent.join()
    await _reach(lambda: tally.committed == agents)
    formed_s = time.monotonic() - began_s
    await asyncio.sleep(3)
    server = psutil.Process(pid)
    tally.answered, tally.late_s = 0, []
    cpu_s, began_s = sum(server.cpu_times()[:2]), time.monotonic()
    await asyncio.sleep(seconds)
    used_s, took_s = sum(server.cpu_times()[:2]) - cpu_s, time.monotonic() - began_s
    return {
        "agents": agents,
        "ranks": ranks,
        "connect_s": round(connected_s, 2),
        "formation_s": round(formed_s, 3),
        "heartbeats_per_s": round(tally.answered / took_s),
        "cpu_share": round(used_s / took_s, 3),
        "cpu_us_per_heartbeat": round(1e6 * used_s / max(1, tally.answered), 1),
        "p50_ms": round(1e3 * quantile(tally.late_s, 0.5), 2),
        "p99_ms": round(1e3 * quantile(tally.late_s, 0.99), 2),
        "rss_mib": round(server.memory_info().rss / 2**20, 1),
    }


async def _reach(true: Any) -> None:
    async with asyncio.timeout(120):
        while not true():  # noqa: ASYNC110  what is waited for are counters
            await asyncio.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "everstep.cli", "coordinator"]
        where = ["--listen", f"127.0.0.1:{port}", "--state-dir", folder]
        with (Path(folder) / "log").open("wb") as log:
            server = subprocess.Popen([*command, *where], stderr=log)
        try:
            _await_health(port)
            print(
                json.dumps(
                    uvloop.run(measure(port, server.pid, asked.agents, asked.ranks, asked.seconds))
                )
            )
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(20)


def _await_health(port: int) -> None:
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit("the coordinator did not start")


if __name__ == "__main__":
    main()

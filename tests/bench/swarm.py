"""Thousands of agents in one process, each with a launcher of 8 ranks, over raw WebSockets.

They speak the real protocol and cost little: a heartbeat is a frame made once, with its numbers
patched in, and an answer is recognised by its first bytes. What such an agent never looks at (who
else is in a plan) is not decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from everstep.wire.codec import encode
from everstep.wire.messages import (
    AgentHello,
    AgentToCoordinator,
    ClientMessage,
    FromClient,
    Heartbeat,
    HeartbeatReply,
    Join,
    Peer,
    RankEnded,
    RankProgress,
    RanksStarted,
    StoreBound,
    Tally,
)

RANKS = 8
HEARTBEAT_S = 1.0
UID = 1000
_RETRY_FIRST_S, _RETRY_LAST_S = 0.1, 2.0
_CONNECTS_A_SECOND = 1000
_UPGRADE = (
    b"GET /v1/agent HTTP/1.1\r\nHost: coordinator\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
    b"Sec-WebSocket-Version: 13\r\n\r\n"
)
_REPLY = encode(HeartbeatReply(seq=0, received_at_s=0.0, sent_at_s=0.0)).split(b"seq")[0]
# Numbers that take five bytes whatever they grow to, and stand nowhere else in a heartbeat.
_SEQ, _STEP = 0x80001111, 0x80002222
_SENT_AT_S = 1.234567891234e9


class _Plan(msgspec.Struct):
    generation: int


class _Body(msgspec.Struct):
    kind: str
    nonce: str = ""
    generation: int = 0
    plan: _Plan | None = None
    why: str = ""


class _Message(msgspec.Struct):
    kind: str
    body: _Body | None = None
    why: str = ""


_decoder = msgspec.msgpack.Decoder(_Message)


@dataclass(eq=False)
class Job:
    """One job over some of the agents."""

    name: str
    agents: list[Agent] = field(default_factory=list)

    def runs(self, generation: int) -> bool:
        """Return whether every launcher has the plan of this generation."""
        return all(agent.generation >= generation for agent in self.agents)


class Beat:
    """A heartbeat as a ready frame."""

    def __init__(self, ranks: list[RankProgress]) -> None:
        body = encode(
            Heartbeat(seq=_SEQ, sent_at_s=_SENT_AT_S, ranks=ranks, offset_s=0.0, error_s=1e-4)
        )
        self._frame = bytearray(frame(body))
        self._seq_at = self._frame.index(struct.pack(">BI", 0xCE, _SEQ)) + 1
        self._sent_at = self._frame.index(struct.pack(">Bd", 0xCB, _SENT_AT_S)) + 1
        self._steps_at = _all_at(self._frame, struct.pack(">BI", 0xCE, _STEP), skip=1)

    def now(self, seq: int, wall_s: float) -> bytes:
        """Return it with today's numbers: ten steps more each time."""
        whole = self._frame
        struct.pack_into(">I", whole, self._seq_at, 0x80000000 + seq)
        struct.pack_into(">d", whole, self._sent_at, wall_s)
        for at in self._steps_at:
            struct.pack_into(">I", whole, at, 0x10000 + 10 * seq)
        return bytes(whole)


class Agent(asyncio.Protocol):
    """One agent, its launcher and its ranks. Reconnects as the real one does."""

    def __init__(self, swarm: Swarm, number: int, job: Job) -> None:
        self.generation = 0
        self.nonce: str | None = None
        self.joined = False
        self.replies = 0  # of this connection
        self._swarm = swarm
        self._job = job
        self._place = len(job.agents)
        self._node = f"n{number:05d}"
        self._peer = Peer(pid=number + 2, uid=UID, gid=UID, start_ticks=number, boot_id=self._node)
        self._epoch = f"{number:032x}"
        self._transport: asyncio.Transport | None = None
        self._upgraded = False
        self._buffer = b""
        self._sent_s: deque[float] = deque()
        self._beat = Beat([])
        self._beats = itertools.count(1)
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            "asyncio.Transport", transport
        )  # uvloop's is one by its methods only
        self._upgraded, self._buffer, self.replies = False, b"", 0
        self._sent_s.clear()
        self._transport.write(_UPGRADE)

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._transport = None
        self.joined = False
        self._swarm.lost(self)

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        data = self._buffer + data if self._buffer else data
        at = 0
        if not self._upgraded:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._buffer = data
                return
            if not data.startswith(b"HTTP/1.1 101"):
                raise RuntimeError(f"no WebSocket: {data[:end].decode()}")
            self._upgraded, at = True, end + 4
            self._send(self._hello())
        while (found := _next_frame(data, at)) is not None:
            opcode, start, at = found
            if opcode == 2:
                self._take(data, start, at)
            elif opcode == 8:
                self.close()
        self._buffer = data[at:]

    def _send(self, message: AgentToCoordinator) -> None:
        if self._transport is not None:
            self._transport.write(frame(encode(message)))

    # ------------------------------------------------------------------------ heartbeats

    def _take(self, data: bytes, start: int, end: int) -> None:
        if data.startswith(_REPLY, start):
            self.replies += 1
            self._swarm.answered(time.perf_counter() - self._sent_s.popleft())
            return
        message = _decoder.decode(data[start:end])
        match message.kind:
            case "CoordinatorWelcome":
                self._say(self._join())
                self._beat_now(asyncio.get_running_loop().time())
            case "CoordinatorRefusal":
                raise RuntimeError(f"{self._node} was refused: {message.why}")
            case _:
                if message.body is not None:
                    self._obey(message.body)

    def _beat_now(self, due_s: float) -> None:
        if self._transport is None:
            return
        loop = asyncio.get_running_loop()
        self._swarm.late_s.append(loop.time() - due_s)
        self._sent_s.append(time.perf_counter())
        self._transport.write(self._beat.now(next(self._beats), time.time()))
        due_s = max(due_s + HEARTBEAT_S, loop.time())
        self._timer = loop.call_at(due_s, self._beat_now, due_s)

    def put_off(self, wait_s: float) -> None:
        """Send the next heartbeat after so long, and then one a second from there."""
        if self._timer is not None:
            self._timer.cancel()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(wait_s, self._beat_now, loop.time() + wait_s)

    # ------------------------------------------------------------------------ the launcher

    def _obey(self, body: _Body) -> None:
        match body.kind:
            case "Joined":
                self.nonce, self.joined = body.nonce, True
            case "BindStore":
                generation = body.generation
                bound = StoreBound(
                    nonce=body.nonce, generation=generation, address="127.0.0.1", port=29400
                )
                self._say(bound)
            case "Committed" if body.plan and body.plan.generation > self.generation:
                self._take_plan(body.plan.generation)
            case "Refused" | "JobOver":
                raise RuntimeError(f"{self._node}: {body.kind}: {body.why}")
            case _:
                pass  # Ack, Link

    def _take_plan(self, generation: int) -> None:
        self.generation = generation
        self._swarm.last_plan_s = time.perf_counter()
        assert self.nonce is not None
        self._beat = Beat([self._progress(i) for i in range(RANKS)])
        pids = [100_000 + self._peer.pid * RANKS + i for i in range(RANKS)]
        started = RanksStarted(
            nonce=self.nonce, generation=generation, pids=pids, ranks=list(self._ranks())
        )
        self._post(started)

    def end_rank(self) -> None:
        """Tell that a rank was killed."""
        assert self.nonce is not None
        ended = RankEnded(
            nonce=self.nonce,
            generation=self.generation,
            rank=self._ranks()[0],
            local_rank=0,
            pid=100_000 + self._peer.pid * RANKS,
            exit_code=None,
            signal=9,
            at_s=time.time(),
        )
        self._post(ended)

    def _ranks(self) -> range:
        return range(self._place * RANKS, (self._place + 1) * RANKS)

    def _progress(self, local_rank: int) -> RankProgress:
        return RankProgress(
            job=self.nonce or "",
            generation=self.generation,
            rank=self._ranks()[local_rank],
            pid=100_000 + self._peer.pid * RANKS + local_rank,
            phase="step",
            step=_STEP,
            standing_s=0.0543,
            p99_step_s=0.1234,
            loss=2.3456,
            grad_norm=0.9876,
            tokens=262_144,
            lr=0.0003,
            step_s=0.1123,
            uid=UID,
            tally=Tally(_STEP, _SENT_AT_S - 1.0, 12.5, 3.25),
        )

    def _hello(self) -> AgentHello:
        return AgentHello(
            node=self._node,
            epoch=self._epoch,
            machine_id=self._node,
            boot_id=self._node,
            address="127.0.0.1",
        )

    def _join(self) -> Join:
        size = len(self._job.agents)
        return Join(
            run_id=self._job.name,
            nonce=self.nonce,
            min_nodes=size,
            max_nodes=size,
            local_world_size=RANKS,
            running_generation=self.generation,
        )

    def _post(self, body: ClientMessage) -> None:
        self._say(body, seq=next(self._numbers))

    def _say(self, body: ClientMessage, seq: int = 0) -> None:
        self._send(FromClient(client="c1", peer=self._peer, body=body, seq=seq))


class Swarm:
    """All agents, in jobs of `job_nodes` nodes each."""

    def __init__(self, port: int, *, job_nodes: int) -> None:
        self.jobs: list[Job] = []
        self.losses = 0
        self.delays_s: list[float] = []  # from a heartbeat to its answer
        self.late_s: list[float] = []  # of our own: how long after its time a heartbeat left
        self.last_plan_s = 0.0
        self._agents: list[Agent] = []
        self._port = port
        self._job_nodes = job_nodes
        self._connecting: set[asyncio.Task[None]] = set()
        self._closing = False
        self._failure: object = None
        asyncio.get_running_loop().set_exception_handler(self._fail)

    def __len__(self) -> int:
        return len(self._agents)

    async def grow(self, count: int) -> None:
        """Start agents until there are so many, and wait until all their jobs run."""
        new: list[Agent] = []
        for number in range(len(self._agents), count):
            if not new or len(self.jobs[-1].agents) == self._job_nodes:
                self.jobs.append(Job(f"job{len(self.jobs)}"))
            agent = Agent(self, number, self.jobs[-1])
            self.jobs[-1].agents.append(agent)
            new.append(agent)
        self._agents += new
        over_s = max(1, len(new) // _CONNECTS_A_SECOND)  # whole seconds: heartbeats spread evenly
        for agent in new:
            self._connect(agent, random.uniform(0, over_s))
        formed = f"{count} agents are in their jobs"
        await self.until(lambda: all(job.runs(1) for job in self.jobs), formed)

    async def until(self, true: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
        """Wait until it is true. Raises RuntimeError when it does not come, or an agent failed."""
        end_s = time.monotonic() + timeout_s
        while not true():
            if self._failure is not None:
                raise RuntimeError(f"an agent failed: {self._failure!r}")
            if time.monotonic() > end_s:
                raise RuntimeError(f"not within {timeout_s:.0f} s: {what}")
            await asyncio.sleep(0.01)

    def spread(self) -> None:
        """Spread the heartbeats evenly, as they are when agents have long since come one by one."""
        for agent in self._agents:
            agent.put_off(random.random() * HEARTBEAT_S)

    def serves_all(self) -> bool:
        """Return whether every agent is in, has its launcher's place, and is answered."""
        return all(agent.replies and agent.joined for agent in self._agents)

    def answered(self, delay_s: float) -> None:
        """Take the time between a heartbeat and its answer."""
        self.delays_s.append(delay_s)

    def lost(self, agent: Agent) -> None:
        """Bring an agent back whose connection ended."""
        self.losses += 1
        if not self._closing:
            self._connect(agent, _RETRY_FIRST_S * random.uniform(0.5, 1.0))

    async def close(self) -> None:
        """Hang up on everybody's behalf."""
        self._closing = True
        for task in list(self._connecting):
            task.cancel()
        for agent in self._agents:
            agent.close()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        await asyncio.sleep(0)

    def _connect(self, agent: Agent, wait_s: float) -> None:
        task = asyncio.get_running_loop().create_task(self._keep_trying(agent, wait_s))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _fail(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._failure = self._failure or context.get("exception") or context["message"]

    async def _keep_trying(self, agent: Agent, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        next_s = _RETRY_FIRST_S
        while True:
            await asyncio.sleep(wait_s)
            next_s = min(_RETRY_LAST_S, next_s * 2)
            wait_s = next_s * random.uniform(0.5, 1.0)
            with contextlib.suppress(OSError):
                await loop.create_connection(lambda: agent, "127.0.0.1", self._port)
                return


def frame(body: bytes) -> bytes:
    """Return a client's binary frame; the mask is of zeros, which the server applies all the same.

    >>> frame(b"ab").hex()
    '8282000000006162'
    """
    size = len(body)
    if size < 126:
        head = struct.pack(">BBI", 0x82, 0x80 | size, 0)
    elif size < 65536:
        head = struct.pack(">BBHI", 0x82, 0x80 | 126, size, 0)
    else:
        head = struct.pack(">BBQI", 0x82, 0x80 | 127, size, 0)
    return head + body


def _next_frame(data: bytes, at: int) -> tuple[int, int, int] | None:
    """Return opcode, start and end of the body of the frame at `at`, None if it is not whole."""
    have = len(data) - at
    if have < 2:
        return None
    size, start = data[at + 1], at + 2
    if size == 126:
        if have < 4:
            return None
        size, start = int.from_bytes(data[at + 2 : at + 4], "big"), at + 4
    elif size == 127:
        if have < 10:
            return None
        size, start = int.from_bytes(data[at + 2 : at + 10], "big"), at + 10
    if len(data) < start + size:
        return None
    return data[at] & 0x0F, start, start + size


def _all_at(data: bytes | bytearray, needle: bytes, *, skip: int) -> list[int]:
    found, at = [], data.find(needle)
    while at >= 0:
        found.append(at + skip)
        at = data.find(needle, at + 1)
    return found

"""A small agent over a real WebSocket, with launchers that do what they are told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import aiohttp

from everstep.wire.codec import Decoder, encode
from everstep.wire.messages import (
    Ack,
    AgentHello,
    AgentMessage,
    AgentToCoordinator,
    BindStore,
    ClientGone,
    ClientMessage,
    Committed,
    CoordinatorRefusal,
    CoordinatorToAgent,
    CoordinatorWelcome,
    FromClient,
    GroupSucceeded,
    Heartbeat,
    HeartbeatReply,
    JobOver,
    Join,
    Joined,
    Peer,
    Plan,
    RankEnded,
    RankProgress,
    RanksStarted,
    StoreBound,
    ToClient,
)

_decoder: Decoder[CoordinatorToAgent] = Decoder(CoordinatorToAgent)
UID = 1000


async def until(true: Callable[[], object], *, within: float = 30.0, what: str = "") -> None:
    """Wait until something is true."""
    end_s = time.monotonic() + within
    while not true():
        assert time.monotonic() < end_s, f"not within {within} s: {what}"
        await asyncio.sleep(0.02)


@dataclass
class Launcher:
    """A launcher with one rank, which trains as long as nobody ends it."""

    agent: FakeAgent
    client: str
    pid: int
    join: Join
    nonce: str | None = None
    running: int = 0
    succeeded: bool = False
    plans: list[Plan] = field(default_factory=list)
    over: JobOver | None = None
    heard: list[AgentMessage] = field(default_factory=list)
    outbox: dict[int, ClientMessage] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    started_s: float = 0.0
    uid: int = UID

    @property
    def peer(self) -> Peer:
        return Peer(
            pid=self.pid,
            uid=self.uid,
            gid=self.uid,
            start_ticks=self.pid,
            boot_id=self.agent.hello.boot_id,
        )

    def page(self) -> RankProgress:
        step = int((time.monotonic() - self.started_s) / 0.05) + 1
        rank = [m.node for m in self.plans[-1].members].index(self.agent.hello.node)
        return RankProgress(
            job=self.nonce or "",
            generation=self.running,
            rank=rank,
            pid=self.pid,
            phase="step",
            step=step,
            standing_s=0.01,
            p99_step_s=0.05,
            loss=1.0,
            uid=self.uid,
        )


class FakeAgent:
    """One agent. `async with` it; it reconnects until closed."""

    def __init__(
        self, url: str, node: str, *, token: str = "", epoch: str | None = None, machine: str = "m"
    ) -> None:
        self.hello = AgentHello(
            node=node,
            epoch=epoch or uuid.uuid4().hex,
            machine_id=machine,
            boot_id=f"boot-{machine}",
            address="127.0.0.1",
            token=token,
        )
        self.url = url
        self.launchers: list[Launcher] = []
        self.welcomes: list[CoordinatorWelcome] = []
        self.refusals: list[CoordinatorRefusal] = []
        self.replies: list[HeartbeatReply] = []
        self.closes: list[str] = []
        self.other: list[CoordinatorToAgent] = []
        self.up = asyncio.Event()
        self._ws: aiohttp.ClientWebSocketResponse | None = None
        self._task: asyncio.Task[None] | None = None
        self._pids = itertools.count(int(uuid.uuid4().int % 10_000) + 100)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """End it; its socket is closed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        async with aiohttp.ClientSession() as http:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with http.ws_connect(self.url) as ws:
                        await self._talk(ws)
                self.up.clear()
                self._ws = None
                await asyncio.sleep(0.05)

    async def _talk(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        await ws.send_bytes(encode(self.hello))
        beating: asyncio.Task[None] | None = None
        try:
            async for raw in ws:
                message = _decoder.decode(raw.data)
                if isinstance(message, CoordinatorWelcome):
                    self._ws = ws
                    self.welcomes.append(message)
                    beating = asyncio.create_task(self._beat(ws))
                    for launcher in self.launchers:
                        await self._greet(launcher)
                    self.up.set()
                elif isinstance(message, CoordinatorRefusal):
                    self.refusals.append(message)
                else:
                    await self._hear(message)
            self.closes.append(str(ws.close_code))
        finally:
            if beating is not None:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)

    async def _beat(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        for seq in itertools.count(1):
            pages = [la.page() for la in self.launchers if la.running and not la.succeeded]
            beat = Heartbeat(
                seq=seq, sent_at_s=time.time(), ranks=pages, offset_s=0.0, error_s=0.001
            )
            await ws.send_bytes(encode(beat))
            await asyncio.sleep(0.25)

    async def send(self, message: AgentToCoordinator) -> None:
        """Send, if connected."""
        if self._ws is not None:
            with contextlib.suppress(ConnectionError):
                await self._ws.send_bytes(encode(message))

    async def send_raw(self, data: bytes) -> None:
        assert self._ws is not None
        await self._ws.send_bytes(data)

    async def _hear(self, message: CoordinatorToAgent) -> None:
        if isinstance(message, HeartbeatReply):
            self.replies.append(message)
        elif isinstance(message, ToClient):
            for launcher in self.launchers:
                if launcher.client == message.client:
                    launcher.heard.append(message.body)
                    await self._obey(launcher, message.body)
        else:
            self.other.append(message)

    # ------------------------------------------------------------------------ launchers

    async def launch(
        self, run: str, *, nnodes: tuple[int, int], nproc: int = 1, uid: int = UID
    ) -> Launcher:
        """Start a launcher; returns when it has its answer, so that the order is the caller's."""
        pid = next(self._pids)
        join = Join(
            run_id=run,
            nonce=None,
            min_nodes=nnodes[0],
            max_nodes=nnodes[1],
            local_world_size=nproc,
        )
        launcher = Launcher(self, f"c{pid}", pid, join, uid=uid)
        self.launchers.append(launcher)
        await self._greet(launcher)
        await until(lambda: launcher.heard, what="an answer to Join")
        return launcher

    async def _greet(self, launcher: Launcher) -> None:
        join = Join(
            run_id=launcher.join.run_id,
            nonce=launcher.nonce,
            min_nodes=launcher.join.min_nodes,
            max_nodes=launcher.join.max_nodes,
            local_world_size=launcher.join.local_world_size,
            running_generation=launcher.running,
            succeeded=launcher.succeeded,
        )
        await self._say(launcher, join)
        for seq, body in list(launcher.outbox.items()):
            await self._say(launcher, body, seq)

    async def post(self, launcher: Launcher, body: ClientMessage) -> None:
        """Say it, and again until it is acknowledged."""
        seq = next(launcher.numbers)
        launcher.outbox[seq] = body
        await self._say(launcher, body, seq)

    async def _say(self, launcher: Launcher, body: ClientMessage, seq: int = 0) -> None:
        message = FromClient(client=launcher.client, peer=launcher.peer, body=body, seq=seq)
        await self.send(message)

    async def _obey(self, launcher: Launcher, body: AgentMessage) -> None:
        match body:
            case Joined(nonce=nonce):
                launcher.nonce = nonce
            case Ack(seq=seq):
                for number in [n for n in launcher.outbox if n <= seq]:
                    del launcher.outbox[number]
            case BindStore(nonce=nonce, generation=generation):
                bound = StoreBound(
                    nonce=nonce, generation=generation, address="127.0.0.1", port=29400
                )
                await self._say(launcher, bound)
            case Committed(plan=plan):
                await self._take_plan(launcher, plan)
            case JobOver() as over:
                launcher.over, launcher.running = over, 0
            case _:
                pass

    async def _take_plan(self, launcher: Launcher, plan: Plan) -> None:
        if launcher.plans and plan.generation <= launcher.plans[-1].generation:
            return
        launcher.plans.append(plan)
        launcher.running = 0
        if self.hello.node in [m.node for m in plan.members]:
            launcher.running, launcher.succeeded = plan.generation, False
            launcher.started_s = time.monotonic()
            started = RanksStarted(
                nonce=plan.job, generation=plan.generation, pids=[launcher.pid + 1], ranks=[0]
            )
            await self.post(launcher, started)

    async def end_rank(
        self,
        launcher: Launcher,
        *,
        sig: int | None = None,
        code: int | None = None,
        error: str | None = None,
    ) -> None:
        """The launcher's rank ends."""
        page = launcher.page()
        ended = RankEnded(
            nonce=launcher.nonce or "",
            generation=launcher.running,
            rank=page.rank,
            local_rank=0,
            pid=launcher.pid + 1,
            exit_code=code,
            signal=sig,
            at_s=time.time(),
            error=error,
        )
        launcher.running = 0
        await self.post(launcher, ended)

    async def succeed(self, launcher: Launcher) -> None:
        """The launcher's rank ends with 0."""
        launcher.succeeded = True
        done = GroupSucceeded(nonce=launcher.nonce or "", generation=launcher.running)
        await self.post(launcher, done)

    async def kill_launcher(self, launcher: Launcher) -> None:
        """The launcher dies; the agent's pidfd says so."""
        self.launchers.remove(launcher)
        gone = ClientGone(client=launcher.client, peer=launcher.peer, died=True, at_s=time.time())
        await self.send(gone)

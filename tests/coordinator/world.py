"""A cluster in virtual time: agents, launchers and ranks that behave, until a test breaks them.

Only the decision core is real here. The fakes say what docs/protocol.md says that they say.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from everstep.coordinator.books import JobBook, replay
from everstep.coordinator.cluster import Cluster
from everstep.coordinator.config import CoordinatorConfig
from everstep.coordinator.facts import AnyFact, Fact, NodeMoved
from everstep.coordinator.incidents import Incident
from everstep.coordinator.operator import Operator
from everstep.coordinator.turn import Effect, HangUp, Record, Send, Tell
from everstep.wire.messages import (
    Ack,
    AgentHello,
    AgentMessage,
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
    Hello,
    JobOver,
    Join,
    Joined,
    Leaving,
    Peer,
    Phase,
    Plan,
    RankEnded,
    RankProgress,
    RanksStarted,
    RankTimeline,
    Refused,
    SnapshotCommitted,
    SnapshotHeld,
    StoreBound,
    StoreFailed,
    Tally,
    ToClient,
)

BROKEN = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
    "Connection closed by peer [10.0.0.7]:60582."
)
STEP_S, START_S = 0.5, 0.75
DATA_S = 0.1  # of each step, waited for samples
TICK_S = 0.25  # coarser than the real one: fewer turns to play through
UID = 1000
F = TypeVar("F", bound=Fact)


@dataclass
class FakeRank:
    """One rank: where it is, and since when it stands there."""

    rank: int
    pid: int
    started_s: float
    changed_s: float
    step: int = 0
    phase: Phase = "start"
    alive: bool = True
    stopped: bool = False
    shown: bool = True
    stepped_s: float = 0.0
    steps_done: int = 0
    timeline: RankTimeline | None = None


@dataclass
class FakeLauncher:
    """One torchrun with the everstep handler."""

    node: FakeNode
    pid: int
    join: Join
    nonce: str | None = None
    last: int = 0
    running: int = 0
    succeeded: bool = False
    plan: Plan | None = None
    ranks: list[FakeRank] = field(default_factory=list)
    binds: bool = True
    starts: bool = True
    refuses_to_bind: bool = False
    alive: bool = True
    over: JobOver | None = None
    refused: Refused | None = None
    plans: list[Plan] = field(default_factory=list)
    bind_orders: list[int] = field(default_factory=list)
    outbox: dict[int, ClientMessage] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def client(self) -> str:
        return f"c{self.pid}"

    @property
    def peer(self) -> Peer:
        boot = self.node.boot
        return Peer(pid=self.pid, uid=UID, gid=UID, start_ticks=self.pid * 10, boot_id=boot)


@dataclass
class FakeNode:
    """One machine."""

    name: str
    boot: str
    epoch: int = 0
    agent: bool = False
    frozen: bool = False
    cut: bool = False
    connection: int | None = None
    reconnect_s: float = 0.0
    greet_s: float | None = None
    beat_s: float = -1e9
    beats: int = 0
    health: str = "healthy"
    offset_s: float = 0.0
    launchers: list[FakeLauncher] = field(default_factory=list)
    backlog: list[CoordinatorToAgent] = field(default_factory=list)

    @property
    def reachable(self) -> bool:
        return self.agent and self.connection is not None and not self.frozen and not self.cut


class World:
    """The coordinator's core and everything around it."""

    def __init__(
        self,
        nodes: Sequence[str] = (),
        *,
        config: CoordinatorConfig | None = None,
        seed: int = 0,
        now_s: float = 1_000_000.0,
    ) -> None:
        self.now_s = now_s
        self.config = config or CoordinatorConfig()
        self.rng = random.Random(seed)
        self.journal: list[AnyFact] = []
        self.nodes: dict[str, FakeNode] = {}
        self.told: list[Tell] = []
        self.crash_in: int | None = None
        self.crashes = 0
        self.greet_after_s = 0.0
        self.ranks_say_hello = True
        self.ranks_tell_times = True
        self.resumes_from_folder = 0
        self.steps_until: int | None = None
        self.snapshot_every: int | None = None
        self.resumed_at: list[tuple[int, str]] = []
        self.up = True
        self._numbers = itertools.count(1)
        self._pids = itertools.count(100)
        self._nonces = itertools.count(1)
        self._deliveries: deque[tuple[int, CoordinatorToAgent]] = deque()
        self._delivering = False
        self.cluster = self._start()
        for name in nodes:
            self.start_agent(name)

    # ------------------------------------------------------------------------ the coordinator

    def _start(self) -> Cluster:
        books = replay(list(self.journal))
        cluster = Cluster(books, self.config, now_s=self.now_s, nonce=self._nonce)
        self.cluster = cluster
        self.up = True
        self._carry_out(cluster.start(self.now_s, "test"))
        return cluster

    def _nonce(self) -> str:
        return f"job-{next(self._nonces)}"

    def kill_coordinator(self) -> None:
        assert replay(list(self.journal)) == self.cluster.books
        self._crash()

    def _crash(self) -> None:
        self.up = False
        self.crash_in = None
        self.crashes += 1
        self._deliveries.clear()
        for node in self.nodes.values():
            node.connection, node.reconnect_s = None, self.now_s + 0.1
            node.backlog.clear()

    def start_coordinator(self) -> None:
        self._start()

    def restart_coordinator(self) -> None:
        self.kill_coordinator()
        self.start_coordinator()

    def _carry_out(self, effects: list[Effect]) -> None:
        """One turn's facts are durable together; what is sent comes after, one by one."""
        facts = [e.fact for e in effects if isinstance(e, Record)]
        if facts and self._crashes_now():
            return
        self.journal.extend(facts)
        for effect in effects:
            if isinstance(effect, Record):
                continue
            if self._crashes_now():
                return
            match effect:
                case Send(connection, message):
                    self._deliveries.append((connection, message))
                case HangUp(connection):
                    self._hang_up(connection)
                case Tell():
                    self.told.append(effect)
        self._deliver()

    def _crashes_now(self) -> bool:
        if self.crash_in is None:
            return False
        self.crash_in -= 1
        if self.crash_in < 0:
            self._crash()
            return True
        return False

    def _hang_up(self, connection: int) -> None:
        for node in self.nodes.values():
            if node.connection == connection:
                node.connection, node.reconnect_s = None, self.now_s + 0.1
                self._carry_out(self.cluster.closed(self.now_s, connection, node.name))

    def _deliver(self) -> None:
        if self._delivering:
            return
        self._delivering = True
        while self._deliveries and self.up:
            connection, message = self._deliveries.popleft()
            node = next((n for n in self.nodes.values() if n.connection == connection), None)
            if node is None:
                continue
            if node.frozen:
                node.backlog.append(message)
            elif not node.cut:
                self._arrive(node, message)
        self._delivering = False

    def _arrive(self, node: FakeNode, message: CoordinatorToAgent) -> None:
        if not isinstance(message, ToClient):
            return
        for launcher in node.launchers:
            if launcher.alive and launcher.client == message.client:
                self._launcher_hears(launcher, message.body)

    # ------------------------------------------------------------------------ agents

    def start_agent(self, name: str) -> FakeNode:
        """Start an agent: with a new epoch, on the same boot."""
        node = self.nodes.setdefault(name, FakeNode(name, f"boot-{name}"))
        assert not node.agent
        node.agent, node.epoch, node.frozen = True, node.epoch + 1, False
        node.beats = 0
        node.backlog.clear()
        self.connect(name)
        return node

    def connect(self, name: str) -> CoordinatorWelcome | CoordinatorRefusal:
        node = self.nodes[name]
        number = next(self._numbers)
        hello = AgentHello(
            node=name,
            epoch=f"{name}-{node.epoch}",
            machine_id=f"machine-{name}",
            boot_id=node.boot,
            address=f"10.0.0.{list(self.nodes).index(name) + 1}",
        )
        reply, effects = self.cluster.connect(self.now_s, number, hello)
        if isinstance(reply, CoordinatorWelcome):
            node.connection, node.beat_s = number, -1e9
        else:
            node.reconnect_s = self.now_s + reply.retry_s
        self._carry_out(effects)
        if node.connection == number:
            node.greet_s = self.now_s + self.greet_after_s
            self._greet_all(node)
        return reply

    def _greet_all(self, node: FakeNode) -> None:
        """The clients have noticed that their agent, or its coordinator, is back."""
        if node.greet_s is None or self.now_s < node.greet_s:
            return
        node.greet_s = None
        for launcher in list(node.launchers):
            self._greet(launcher)

    def kill_agent(self, name: str) -> None:
        node = self.nodes[name]
        node.agent = False
        self._close(node)

    def _close(self, node: FakeNode) -> None:
        connection, node.connection = node.connection, None
        if connection is not None and self.up:
            self._carry_out(self.cluster.closed(self.now_s, connection, node.name))

    def break_connection(self, name: str) -> None:
        """A reset that the agent survives; it reconnects."""
        node = self.nodes[name]
        node.reconnect_s = self.now_s + 0.1
        self._close(node)

    def kill_node(self, name: str) -> None:
        """SIGKILL everything on it at once, the agent first."""
        node = self.nodes[name]
        self.kill_agent(name)
        dead = [r for launcher in node.launchers for r in launcher.ranks if r.alive]
        for launcher in node.launchers:
            launcher.alive = False
            for rank in launcher.ranks:
                rank.alive = False
        groups = {(la.nonce, la.running) for la in node.launchers if la.running}
        node.launchers.clear()
        for nonce, generation in groups:
            if dead:
                self._peers_break(nonce, generation)

    def freeze(self, name: str) -> None:
        """SIGSTOP everything on it; its sockets stay open."""
        self.nodes[name].frozen = True

    def thaw(self, name: str) -> None:
        node = self.nodes[name]
        node.frozen = False
        for message in node.backlog:
            if node.connection is not None:
                self._arrive(node, message)
        node.backlog.clear()
        for launcher in node.launchers:  # their peers hung up long ago
            self._break(launcher)

    def _beat(self, node: FakeNode) -> None:
        session = self.cluster.nodes.sessions[node.name]
        node.beats += 1
        node.beat_s = self.now_s
        beat = Heartbeat(
            seq=node.beats,
            sent_at_s=self.now_s - node.offset_s,
            ranks=[p for la in node.launchers for p in self._pages(la)],
            offset_s=node.offset_s if node.beats > 1 else None,
            error_s=0.001,
            health=node.health,
        )
        session.take(beat, self.now_s)

    def _pages(self, launcher: FakeLauncher) -> list[RankProgress]:
        return [self._page(launcher, r) for r in launcher.ranks if r.alive and r.shown]

    def _page(self, launcher: FakeLauncher, rank: FakeRank) -> RankProgress:
        tally = None
        if rank.steps_done and self.ranks_tell_times:
            at_s = rank.stepped_s - launcher.node.offset_s
            tally = Tally(rank.step, at_s, DATA_S * rank.steps_done)
        return RankProgress(
            job=launcher.nonce or "",
            generation=launcher.running,
            rank=rank.rank,
            pid=rank.pid,
            phase=rank.phase,
            step=rank.step,
            standing_s=self.now_s - rank.changed_s,
            p99_step_s=STEP_S if rank.phase == "step" else None,
            uid=UID,
            tally=tally,
        )

    # ------------------------------------------------------------------------ launchers

    def launch(
        self,
        name: str,
        run: str = "run",
        *,
        nnodes: tuple[int, int] = (1, 1),
        nproc: int = 1,
        join_timeout_s: float = 600.0,
        on_evict: str = "park",
        refuses_to_bind: bool = False,
    ) -> FakeLauncher:
        join = Join(
            run_id=run,
            nonce=None,
            min_nodes=nnodes[0],
            max_nodes=nnodes[1],
            local_world_size=nproc,
            join_timeout_s=join_timeout_s,
            on_evict="exit" if on_evict == "exit" else "park",
        )
        launcher = FakeLauncher(
            self.nodes[name], next(self._pids), join, refuses_to_bind=refuses_to_bind
        )
        self.nodes[name].launchers.append(launcher)
        self._greet(launcher)
        return launcher

    def launch_all(
        self, names: Sequence[str], run: str = "run", *, nnodes: tuple[int, int], nproc: int = 1
    ) -> list[FakeLauncher]:
        return [self.launch(name, run, nnodes=nnodes, nproc=nproc) for name in names]

    def _greet(self, launcher: FakeLauncher) -> None:
        if not launcher.alive:
            return
        again = list(launcher.outbox.items())
        join = msgspec.structs.replace(
            launcher.join,
            nonce=launcher.nonce,
            running_generation=launcher.running,
            succeeded=launcher.succeeded,
        )
        self._say(launcher, join)
        for rank in launcher.ranks:
            if rank.alive and rank.shown:
                self._rank_hello(launcher, rank)
        for seq, body in again:
            self._say(launcher, body, seq=seq)

    def _rank_hello(self, launcher: FakeLauncher, rank: FakeRank) -> None:
        hello = Hello(
            role="rank", job=launcher.nonce, generation=launcher.running, rank=rank.rank, page=True
        )
        self._rank_says(launcher, rank, hello)
        if rank.timeline is not None:
            self._rank_says(launcher, rank, rank.timeline)

    def _rank_says(self, launcher: FakeLauncher, rank: FakeRank, body: ClientMessage) -> None:
        peer = msgspec.structs.replace(launcher.peer, pid=rank.pid)
        self._forward(launcher.node, FromClient(client=f"r{rank.pid}", peer=peer, body=body))

    def _mark(self, launcher: FakeLauncher, rank: FakeRank, *moments: str) -> None:
        """The first rank of a node tells when it came up, by its node's clock."""
        if not self.ranks_tell_times or rank is not launcher.ranks[0]:
            return
        line = rank.timeline or RankTimeline(
            nonce=launcher.nonce or "",
            generation=launcher.running,
            rank=rank.rank,
            from_step=rank.step,
        )
        at_s = self.now_s - launcher.node.offset_s
        rank.timeline = msgspec.structs.replace(line, **dict.fromkeys(moments, at_s))
        self._rank_says(launcher, rank, rank.timeline)

    def post(self, launcher: FakeLauncher, body: ClientMessage) -> None:
        """Say it, and again after each reconnect until it is acknowledged."""
        seq = next(launcher.numbers)
        launcher.outbox[seq] = body
        self._say(launcher, body, seq=seq)

    def _say(self, launcher: FakeLauncher, body: ClientMessage, *, seq: int = 0) -> None:
        message = FromClient(client=launcher.client, peer=launcher.peer, body=body, seq=seq)
        self._forward(launcher.node, message)

    def _forward(self, node: FakeNode, message: FromClient | ClientGone) -> None:
        if node.reachable and self.up:
            session = self.cluster.nodes.sessions[node.name]
            self._carry_out(self.cluster.receive(self.now_s, session, message))

    def _launcher_hears(self, launcher: FakeLauncher, body: AgentMessage) -> None:
        match body:
            case Joined(nonce=nonce):
                launcher.nonce = nonce
            case Ack(seq=seq):
                for number in [n for n in launcher.outbox if n <= seq]:
                    del launcher.outbox[number]
            case BindStore(nonce=nonce, generation=generation):
                launcher.bind_orders.append(generation)
                if launcher.refuses_to_bind:
                    self._say(launcher, StoreFailed(nonce=nonce, generation=generation, why="no"))
                elif launcher.binds:
                    bound = StoreBound(
                        nonce=nonce, generation=generation, address="10.0.0.9", port=29500
                    )
                    self._say(launcher, bound)
            case Committed(plan=plan):
                self._take_plan(launcher, plan)
            case JobOver() as over:
                launcher.over = over
                self._clear(launcher)
            case Refused() as refused:
                launcher.refused = refused
                self._clear(launcher)
            case _:
                pass

    def _take_plan(self, launcher: FakeLauncher, plan: Plan) -> None:
        if launcher.plan is not None and plan.generation <= launcher.plan.generation:
            return
        launcher.plan = plan
        launcher.plans.append(plan)
        self._clear(launcher)
        place = [m.node for m in plan.members]
        if launcher.node.name in place and launcher.starts:
            self._start_ranks(launcher, plan, place.index(launcher.node.name))

    def _start_ranks(self, launcher: FakeLauncher, plan: Plan, group_rank: int) -> None:
        first = sum(m.local_world_size for m in plan.members[:group_rank])
        step = int(plan.resume[0][1:7]) if plan.resume else self.resumes_from_folder
        launcher.running, launcher.succeeded = plan.generation, False
        launcher.ranks = [
            FakeRank(first + i, next(self._pids), self.now_s, self.now_s, step=step)
            for i in range(launcher.join.local_world_size)
        ]
        if first == 0:
            self.resumed_at.append((plan.generation, plan.resume[0] if plan.resume else ""))
        started = RanksStarted(
            nonce=plan.job,
            generation=plan.generation,
            pids=[r.pid for r in launcher.ranks],
            ranks=[r.rank for r in launcher.ranks],
        )
        self.post(launcher, started)
        if launcher.ranks:
            self._mark(launcher, launcher.ranks[0], "began_at_s")
        for rank in launcher.ranks:
            if self.ranks_say_hello:
                self._rank_hello(launcher, rank)

    def _clear(self, launcher: FakeLauncher) -> None:
        launcher.ranks, launcher.running = [], 0

    def kill_launcher(self, launcher: FakeLauncher) -> None:
        """SIGKILL a launcher: its reaper takes the ranks along, its agent sees it."""
        node, generation, nonce = launcher.node, launcher.running, launcher.nonce
        launcher.alive = False
        had_ranks = bool(launcher.ranks)
        self._clear(launcher)
        node.launchers.remove(launcher)
        self._forward(
            node,
            ClientGone(client=launcher.client, peer=launcher.peer, died=True, at_s=self.now_s),
        )
        if had_ranks:
            self._peers_break(nonce, generation)

    def leave(self, launcher: FakeLauncher, code: int = 143) -> None:
        """The launcher is told to end and takes its leave."""
        self._say(launcher, Leaving(nonce=launcher.nonce, exit_code=code, why="SIGTERM"))
        self.kill_launcher(launcher)

    # ------------------------------------------------------------------------ ranks

    def group(self, nonce: str | None, generation: int) -> list[tuple[FakeLauncher, FakeRank]]:
        return [
            (launcher, rank)
            for node in self.nodes.values()
            for launcher in node.launchers
            if launcher.nonce == nonce and launcher.running == generation > 0
            for rank in launcher.ranks
        ]

    def rank(self, number: int, run: str = "run") -> tuple[FakeLauncher, FakeRank]:
        book = self.job(run)
        found = self.group(book.id, book.generation)
        return next((la, r) for la, r in found if r.rank == number)

    def end_rank(
        self,
        number: int,
        *,
        run: str = "run",
        sig: int | None = None,
        code: int | None = None,
        error: str | None = None,
        peers_first: bool = False,
    ) -> None:
        """End one rank; its peers' connections break."""
        launcher, rank = self.rank(number, run)
        if peers_first:
            rank.stopped = True  # it is dead, its launcher only has not said so yet
            self._peers_break(launcher.nonce, launcher.running)
        self._end(launcher, rank, sig=sig, code=code, error=error)
        self._peers_break(launcher.nonce, launcher.running or self.job(run).generation)

    def kill_rank(self, number: int, run: str = "run") -> None:
        self.end_rank(number, run=run, sig=signal.SIGKILL)

    def _end(
        self,
        launcher: FakeLauncher,
        rank: FakeRank,
        *,
        sig: int | None,
        code: int | None,
        error: str | None,
    ) -> None:
        rank.alive = False
        ended = RankEnded(
            nonce=launcher.nonce or "",
            generation=launcher.running,
            rank=rank.rank,
            local_rank=0,
            pid=rank.pid,
            exit_code=code,
            signal=sig,
            at_s=self.now_s - launcher.node.offset_s,
            error=error,
            stderr_tail=["rank INFO resumed from s000000-g1"],  # said long before, of other things
        )
        gone = ClientGone(
            client=f"r{rank.pid}",
            peer=msgspec.structs.replace(launcher.peer, pid=rank.pid),
            died=True,
            at_s=self.now_s,
            last=self._page(launcher, rank),
        )
        self.now_s += 0.001
        self.post(launcher, ended)
        self._forward(launcher.node, gone)

    def _peers_break(self, nonce: str | None, generation: int) -> None:
        launchers = {id(la): la for la, _ in self.group(nonce, generation)}
        for launcher in launchers.values():
            if not launcher.node.frozen:
                self._break(launcher)

    def _break(self, launcher: FakeLauncher) -> None:
        """Its ranks fail with a broken connection, unless they have not connected yet."""
        for rank in list(launcher.ranks):
            if rank.alive and not rank.stopped and rank.phase != "start":
                self._end(launcher, rank, sig=None, code=1, error=BROKEN)

    def stop_rank(self, number: int, run: str = "run") -> None:
        """SIGSTOP one rank."""
        self.rank(number, run)[1].stopped = True

    def set_phase(self, phase: Phase, run: str = "run", *, ranks: Sequence[int] = ()) -> None:
        book = self.job(run)
        for _, rank in self.group(book.id, book.generation):
            if not ranks or rank.rank in ranks:
                rank.phase, rank.changed_s = phase, self.now_s

    def _move_ranks(self) -> None:
        for book in self.cluster.books.live_jobs():
            group = self.group(book.id, book.generation)
            whole = len(group) == book.world_size
            free = whole and all(
                r.alive and not r.stopped and not la.node.frozen for la, r in group
            )
            waiting = any(r.phase in ("snapshot", "eval", "first_step") for _, r in group)
            for launcher, rank in group:
                self._move(launcher, rank, free=free and not waiting, whole=whole)
            self._snapshot(book, group)
            self._finish(group)

    def _move(self, launcher: FakeLauncher, rank: FakeRank, *, free: bool, whole: bool) -> None:
        if not rank.alive or rank.stopped or launcher.node.frozen:
            return
        if rank.phase == "start":
            if whole and self.now_s - rank.started_s >= START_S:
                self._mark(launcher, rank, "opened_at_s", "grouped_at_s", "restored_at_s")
                self._step(rank)
                self._mark(launcher, rank, "stepped_at_s")
        elif rank.phase == "step" and free and self.now_s - rank.changed_s >= STEP_S:
            self._step(rank)

    def _step(self, rank: FakeRank) -> None:
        rank.phase, rank.step, rank.changed_s = "step", rank.step + 1, self.now_s
        rank.stepped_s, rank.steps_done = self.now_s, rank.steps_done + 1

    def _snapshot(self, book: JobBook, group: list[tuple[FakeLauncher, FakeRank]]) -> None:
        if not group or self.snapshot_every is None:
            return
        launcher, rank = group[0]
        if rank.rank != 0 or rank.phase != "step" or rank.step % self.snapshot_every:
            return
        name = f"s{rank.step:06d}-g{launcher.running}"
        if name not in book.snapshots and rank.changed_s == self.now_s:
            self.commit_snapshot(launcher, rank.step, launcher.running)

    def hold_snapshot(
        self, step: int, generation: int, *, ranks: Sequence[int], replicated: bool = False
    ) -> None:
        """These ranks say that they hold a snapshot in memory."""
        id_ = f"s{step:06d}-g{generation}"
        for number in ranks:
            launcher, _ = self.rank(number)
            held = SnapshotHeld(
                nonce=launcher.nonce or "",
                id=id_,
                step=step,
                generation=generation,
                rank=number,
                replicated=replicated,
            )
            self._say(launcher, held)

    def commit_snapshot(
        self, launcher: FakeLauncher, step: int, generation: int, *, final: bool = False
    ) -> None:
        taken = SnapshotCommitted(
            nonce=launcher.nonce or "",
            id=f"s{step:06d}-g{generation}",
            step=step,
            generation=generation,
            path="/snapshots",
            world_size=1,
            bytes=1,
            write_s=0.1,
            final=final,
        )
        self.post(launcher, taken)

    def _finish(self, group: list[tuple[FakeLauncher, FakeRank]]) -> None:
        if self.steps_until is None:
            return
        for launcher, _ in group:
            done = launcher.ranks and all(r.step >= self.steps_until for r in launcher.ranks)
            if done and not launcher.succeeded and all(r.alive for r in launcher.ranks):
                self.succeed(launcher)

    def succeed(self, launcher: FakeLauncher) -> None:
        launcher.succeeded = True
        for rank in launcher.ranks:
            rank.phase = "end"
        done = GroupSucceeded(nonce=launcher.nonce or "", generation=launcher.running)
        self.post(launcher, done)

    # ------------------------------------------------------------------------ time

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += TICK_S
            self._pass()

    def until(self, true: Callable[[], object], *, within: float = 60.0) -> float:
        """Let time pass until something is true; return how long it took."""
        start_s = self.now_s
        while not true():
            assert self.now_s - start_s < within, f"not within {within} s: {self.describe()}"
            self.now_s += TICK_S
            self._pass()
        return self.now_s - start_s

    def _pass(self) -> None:
        self._move_ranks()
        if not self.up:
            return
        for node in list(self.nodes.values()):
            lost = node.agent and node.connection is None and not node.frozen
            if lost and self.now_s >= node.reconnect_s:
                self.connect(node.name)
            if node.reachable and self.up:
                self._greet_all(node)
            if node.reachable and self.up and self._beat_due(node):
                self._beat(node)
        if self.up:
            self._carry_out(self.cluster.tick(self.now_s))

    def _beat_due(self, node: FakeNode) -> bool:
        since_s = self.now_s - node.beat_s
        stands = any(
            p.phase == "step" and p.standing_s > 2.0
            for la in node.launchers
            for p in self._pages(la)
        )
        return since_s >= (0.5 if stands else 1.0)

    # ------------------------------------------------------------------------ what came of it

    def job(self, run: str = "run") -> JobBook:
        """Return the newest job of a run."""
        books = [b for b in self.cluster.books.jobs.values() if b.spec.run_id == run]
        return books[-1]

    def members(self, run: str = "run") -> list[str]:
        return self.job(run).members

    def steps(self, run: str = "run") -> int:
        """Return the lowest step of all ranks, 0 while not all run."""
        book = self.job(run)
        group = self.group(book.id, book.generation)
        if len(group) < book.world_size or not all(r.alive for _, r in group):
            return 0
        return min((r.step for _, r in group), default=0)

    def training(self, run: str = "run") -> bool:
        """Whether all ranks of the plan in force step."""
        if not any(b.spec.run_id == run for b in self.cluster.books.jobs.values()):
            return False
        book = self.job(run)
        group = self.group(book.id, book.generation)
        stepping = all(r.alive and r.phase == "step" for _, r in group)
        return book.replan is None and len(group) == book.world_size > 0 and stepping

    def incidents(self, kind: str | None = None) -> list[Incident]:
        found = self.cluster.books.incidents.values()
        return [i for i in found if kind in (None, i.kind)]

    def failures(self) -> list[Incident]:
        return [i for i in self.incidents() if i.kind != "silence"]

    def evicted(self) -> list[str]:
        """Return every node that was ever evicted, in order."""
        return [f.node for f in self.facts(NodeMoved) if f.state == "evicted"]

    def facts(self, kind: type[F]) -> list[F]:
        """Return the journal's facts of one kind."""
        return [f for f in self.journal if isinstance(f, kind)]

    def operator(self, by: str = "ops") -> Operator:
        return Operator(self.cluster, self.now_s, by)

    def ask(self, operator: Operator) -> None:
        """Carry out what an operator's request led to."""
        self._carry_out(operator.effects)

    def describe(self) -> str:
        lines = [f"now {self.now_s:.2f}"]
        for book in self.cluster.books.jobs.values():
            job = self.cluster.jobs.get(book.id)
            lines.append(
                f"{book.id} g{book.generation} members={book.members} replan={book.replan} "
                f"over={book.over} waiting={job.waiting if job else ''} "
                f"standings={job.standings(self.now_s) if job else ''}"
            )
        lines += [f"{i.id} {i.kind} {i.root} {i.decision}" for i in self.incidents()]
        return "\n".join(lines)

    def ask_stop(self, run: str = "run") -> None:
        """An operator stops a job, if it still runs."""
        if self.job(run).over is None:
            operator = self.operator()
            operator.stop(self.job(run).id, "enough")
            self.ask(operator)

"""Carries out what the core decides: journal first, then the messages, in the order decided."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, NoReturn, Protocol

from everstep.coordinator.cluster import TICK_S, Cluster
from everstep.coordinator.turn import Effect, HangUp, Record, Send, Tell

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from everstep.coordinator.facts import AnyFact
    from everstep.coordinator.journal import Journal
    from everstep.wire.messages import CoordinatorToAgent

log = logging.getLogger(__name__)

_CLOCK_SET_S = 1.0


class Link(Protocol):
    """The way to one connected agent; neither call waits."""

    def send(self, message: CoordinatorToAgent) -> None:
        """Send, or forget it when the connection is over."""
        ...

    def hang_up(self, why: str) -> None:
        """Close the connection."""
        ...


class Clock:
    """Wall-clock time that never goes back: set once, carried on by the monotonic clock."""

    def __init__(
        self, wall: Callable[[], float] = time.time, mono: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall = wall
        self._mono = mono
        self._offset_s = wall() - mono()

    def __call__(self) -> float:
        """Return the time in seconds since 1970."""
        return self._mono() + self._offset_s

    def keep_up(self) -> None:
        """Follow a wall clock that was set forward, e.g. by NTP soon after the machine's start."""
        ahead_s = self._wall() - self()
        if ahead_s > _CLOCK_SET_S:
            self._offset_s += ahead_s
            log.warning("clock was set forward", extra={"by_s": round(ahead_s, 1)})


class Runtime:
    """The core, its journal and the links to the agents; everything in one event loop."""

    def __init__(self, cluster: Cluster, journal: Journal, clock: Clock) -> None:
        self.cluster = cluster
        self.journal = journal
        self.clock = clock
        self.links: dict[int, Link] = {}
        self.durable = journal.last
        self.committed = asyncio.Event()  # set, and replaced, with every commit
        self.lag_s = 0.0
        self.on_tell: Callable[[Tell], None] = lambda _: None
        self.watch: list[Callable[[AnyFact], None]] = []
        self._position = journal.last
        self._waiting: deque[tuple[int, Effect]] = deque()

    def perform(self, effects: Sequence[Effect]) -> None:
        """Journal one turn's facts, and send its messages once they are durable."""
        facts = [effect.fact for effect in effects if isinstance(effect, Record)]
        if facts:
            self._position = self.journal.append(facts)
            self._show(facts)
        waiting = ((self._position, e) for e in effects if not isinstance(e, Record))
        self._waiting.extend(waiting)
        self._release()
        for why in self.cluster.refused:
            log.warning("message refused", extra={"why": why})
        self.cluster.refused.clear()

    def is_durable(self, seq: int) -> None:
        """Everything up to this fact is on the disk: send what waited for it."""
        self.durable = max(self.durable, seq)
        committed, self.committed = self.committed, asyncio.Event()
        committed.set()
        self._release()

    async def settle(self) -> None:
        """Wait until everything decided so far is durable."""
        position = self._position
        while self.durable < position:
            await self.committed.wait()

    async def tick(self) -> NoReturn:
        """Let time pass for the core."""
        due_s = time.monotonic() + TICK_S
        while True:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            now_s = time.monotonic()
            self.lag_s = max(0.0, now_s - due_s)
            due_s = max(due_s + TICK_S, now_s)
            self.clock.keep_up()
            self.perform(self.cluster.tick(self.clock()))

    def _release(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.durable:
            _, effect = self._waiting.popleft()
            match effect:
                case Send(connection, message):
                    if (link := self.links.get(connection)) is not None:
                        link.send(message)
                case HangUp(connection, why):
                    if (link := self.links.get(connection)) is not None:
                        link.hang_up(why)
                case Tell():
                    self.on_tell(effect)
                case Record():
                    raise AssertionError("facts are journaled, not sent")

    def _show(self, facts: Sequence[AnyFact]) -> None:
        for fact in facts:
            for look in self.watch:
                look(fact)

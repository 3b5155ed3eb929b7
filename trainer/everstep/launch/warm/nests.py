"""The nurseries of one pool: the one that forks now, and those that only have ranks left."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Protocol

from everstep.launch import reaper
from everstep.launch.warm import frames
from everstep.launch.warm.nest import Nest, Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from everstep.launch.warm.loop import Loop

_MOST_DEATHS = 3


class Told(Protocol):
    """Who is told what becomes of what was asked of a nursery; on the loop's thread."""

    def settled(self) -> None:
        """A nursery has loaded, or there is none to wait for any more."""

    def born(self, shim: int, pid: int, pidfd: int) -> None:
        """A rank was forked for a shim; the descriptor is the receiver's."""

    def refused(self, shim: int, why: str) -> None:
        """No rank will be forked for a shim."""

    def ended(self, pid: int, code: int) -> None:
        """A rank has ended, with an exit code or, negative, by a signal."""


class Nests:
    """All calls on the loop's thread."""

    def __init__(self, loop: Loop, told: Told, say: Callable[[str], None]) -> None:
        self.off: str | None = None
        self.current: Nest | None = None
        self._loop = loop
        self._told = told
        self._say = say
        self._ranks: dict[Nest, set[int]] = {}
        self._deaths = 0

    def pids(self) -> list[int]:
        """Return the pids of all that live; from any thread."""
        return [nest.pid for nest in list(self._ranks)]

    def build(self, spec: Spec) -> None:
        """Start a nursery for the next ranks; the one before stays until its own have ended."""
        self._retire()
        if self.off is not None:
            return
        try:
            nest = Nest.start(spec)
        except (OSError, RuntimeError) as exc:
            self._switch_off(f"no nursery can be started: {exc}")
            return
        self._ranks[nest] = set()
        self.current = nest
        self._loop.watch(nest.sock, lambda: self._hear(nest))

    def fork(
        self, nest: Nest, shim: int, fields: Mapping[str, Sequence[bytes]], fds: Sequence[int]
    ) -> None:
        """Ask for a rank for this shim; `born` or `refused` follows."""
        try:
            frames.send(nest.sock, "fork", {"id": frames.whole(shim), **fields}, fds)
        except OSError as exc:
            self._told.refused(shim, f"nursery {nest.pid} does not listen: {exc}")

    def close(self) -> None:
        """End them all, and their ranks with them."""
        self.off, self.current = "the pool is closed", None
        for nest in list(self._ranks):
            self._drop(nest)

    def _retire(self) -> None:
        nest, self.current = self.current, None
        if nest is not None and not self._ranks.get(nest):
            self._drop(nest)

    def _drop(self, nest: Nest) -> None:
        if self._ranks.pop(nest, None) is not None:
            self._loop.drop(nest.sock)
            nest.close()

    def _switch_off(self, why: str) -> None:
        self.off = why
        self._retire()
        self._say(f"no warm ranks from now on: {why}")
        self._told.settled()

    def _hear(self, nest: Nest) -> None:
        messages = nest.reader.read_or_end()
        for message in messages or ():
            self._take(nest, message)
        if messages is None and nest in self._ranks:
            self._died(nest)

    def _take(self, nest: Nest, message: frames.Message) -> None:
        match message.kind:
            case "ready":
                nest.ready = True
                self._told.settled()
            case "useless":
                self._switch_off(message.text("why"))
            case "refused":
                self._refused(nest, message)
            case "born":
                pid, (pidfd,) = message.number("pid"), message.fds
                self._ranks[nest].add(pid)
                self._told.born(message.number("id"), pid, pidfd)
            case _:  # "ended"
                self._ended(nest, message.number("pid"), message.number("code"))

    def _refused(self, nest: Nest, message: frames.Message) -> None:
        why = message.text("why")
        self._told.refused(message.number("id"), why)
        if message.number("for_good"):
            self._switch_off(why)
        elif nest is self.current:
            self.build(nest.spec)

    def _ended(self, nest: Nest, pid: int, code: int) -> None:
        self._ranks[nest].discard(pid)
        self._told.ended(pid, code)
        if nest is not self.current and not self._ranks[nest]:
            self._drop(nest)

    def _died(self, nest: Nest) -> None:
        """Its ranks died with it, by PR_SET_PDEATHSIG; what they had started is still there."""
        pids = self._ranks[nest]
        self._drop(nest)
        self._deaths += 1
        self._say(f"nursery {nest.pid} has died, and with it {len(pids)} ranks")
        for pid in pids:
            reaper.kill_session(pid)
            self._told.ended(pid, -signal.SIGKILL)
        if nest is self.current:
            self.current = None
            if self._deaths < _MOST_DEATHS:
                self.build(nest.spec)
            else:
                self._switch_off(f"{_MOST_DEATHS} nurseries have died")
            self._told.settled()

"""Takes the ranks of this node into the next generation without torchrun's knowledge.

A rank that said `Ready` is ordered into the new generation and keeps its process. One that ended,
or does not obey in time, is replaced behind its shim by a fresh fork. torchrun sees neither, since
its children are the shims. Where this cannot be done the caller lets torchrun restart its ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from everstep.launch.control import Heard, Ready, Reform, Released
from everstep.sdk.errors import EverstepError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from everstep.launch.control import FromRank, Line

HEARD_S = 0.7
"""How long a rank may take to say that it has the order: one that a signal stopped never does."""
RELEASED_S = 5.0
"""How long it may take to get out of the old generation: out of a collective, a kernel, a read."""
ENDED_S = 5.0
"""How long a rank that was killed may take to be gone: one may hang in the kernel."""


class Forks(Protocol):
    """What makes fresh ranks behind torchrun's children."""

    def able(self, local_rank: int) -> bool:
        """Return whether a fresh one could be put into this rank's place."""
        ...

    def replace(self, local_rank: int, environment: Mapping[str, str]) -> int:
        """Fork another rank and return its pid. Raises OSError or EverstepError when it can't."""
        ...


@dataclass(slots=True)
class Place:
    """One local rank. `pid` None: it ended, and its shim waits for another."""

    pid: int | None
    line: Line | None = None
    ready_in: int = 0
    ordered_s: float | None = None
    heard: bool = False
    released: bool = False
    killed_s: float | None = None

    @property
    def waited_for(self) -> bool:
        """Whether it was ordered into a generation that it has not joined yet."""
        return self.ordered_s is not None and not self.released

    def late(self, now_s: float) -> str | None:
        """Return what it failed to do in time since it was ordered, None while it may."""
        if self.ordered_s is None or self.released or self.pid is None or self.killed_s is not None:
            return None
        waited_s = now_s - self.ordered_s
        if not self.heard and waited_s >= HEARD_S:
            return f"did not answer within {HEARD_S:g} s"
        if waited_s >= RELEASED_S:
            return f"did not leave its generation within {RELEASED_S:g} s"
        return None


class InPlace:
    """The local ranks of one launcher. Safe to call from any thread.

    `changed` is told generation and pids whenever processes took their places in it; `gave_up` that
    a generation cannot be joined in place any more, and why.
    """

    def __init__(
        self,
        forks: Forks,
        *,
        changed: Callable[[int, Sequence[int]], None],
        gave_up: Callable[[int, str], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._forks = forks
        self._changed = changed
        self._gave_up = gave_up
        self._say = say
        self._clock = clock
        self._lock = threading.RLock()
        self._places: list[Place] = []
        self._lines: dict[int, tuple[Line, int]] = {}
        self._dropped: set[int] = set()
        self._reserved = False
        self._generation = 0
        self._environments: Sequence[Mapping[str, str]] = ()

    def started(self, generation: int, pids: Sequence[int]) -> None:
        """Torchrun has started these ranks, in order of local rank."""
        with self._lock:
            self._generation, self._reserved = generation, False
            self._dropped.clear()
            self._places = [Place(pid) for pid in pids]
            for pid, (line, ready_in) in list(self._lines.items()):
                self._note_ready(pid, line, ready_in)

    def heard(self, line: Line, message: FromRank | None) -> None:
        """A rank said something, or hung up (None)."""
        with self._lock:
            match message:
                case None:
                    self._lines.pop(line.pid, None)
                    for place in self._places:
                        if place.line is line:
                            place.line = None
                case Ready(generation=generation):
                    self._lines[line.pid] = (line, generation)
                    self._note_ready(line.pid, line, generation)
                case Heard() | Released():
                    self._note_obeyed(line.pid, message)
                case _:
                    pass

    def ended(self, pid: int) -> int:
        """A rank's process ended while its shim is held.

        Return the generation that it has failed, 0 where another takes its place anyway.
        """
        with self._lock:
            for local_rank, place in enumerate(self._places):
                if place.pid == pid:
                    place.pid, place.line = None, None
                    if not place.waited_for:
                        return self._generation
                    self._dropped.add(pid)  # nobody has met it in the new generation yet
                    self._fill(local_rank)
                    self._tell()
            return 0

    def finished(self, pid: int) -> bool:
        """A rank's process ended with 0 while its shim is held; return whether the shim may, too.

        Not where the order into the next generation came too late for it: the others wait for a
        rank there, and a fresh one finishes with them.
        """
        with self._lock:
            self._lines.pop(pid, None)
            for local_rank, place in enumerate(self._places):
                if place.pid == pid and (place.waited_for or self._reserved):
                    place.pid, place.line = None, None
                    if place.waited_for:
                        self._fill(local_rank)
                        self._tell()
                    return False
                if place.pid == pid:
                    place.line = None
            return True

    def absorbs(self, pid: int) -> bool:
        """Return whether the end of this process is no failure: another takes its place."""
        with self._lock:
            on_its_way = any(p.pid == pid and p.waited_for for p in self._places)
            return on_its_way or pid in self._dropped

    def why_not(self, generation: int) -> str | None:
        """Return why the ranks of `generation` cannot leave it in place, None when they can."""
        with self._lock:
            if generation != self._generation or not self._places:
                return "its ranks are not known yet"
            for local_rank, place in enumerate(self._places):
                if place.pid is not None and (place.line is None or place.ready_in != generation):
                    return f"local rank {local_rank} cannot be formed anew"
            return None

    def reserve(self, generation: int) -> bool:
        """Return whether `generation` can be left in place; what ends then waits for `order`."""
        with self._lock:
            self._reserved = self.why_not(generation) is None
            return self._reserved

    def order(self, generation: int, environments: Sequence[Mapping[str, str]]) -> None:
        """Take all local ranks into `generation`, each with its environment."""
        with self._lock:
            self._generation, self._environments = generation, environments
            self._reserved = False
            for local_rank, place in enumerate(self._places):
                if place.pid is None:
                    self._fill(local_rank)
                else:
                    self._order(local_rank, place)
            self._tell()

    def tick(self) -> float | None:
        """Replace who did not obey; return seconds until the next look is due, None for never."""
        now_s = self._clock()
        with self._lock:
            for local_rank, place in enumerate(self._places):
                if (late := place.late(now_s)) is not None:
                    self._drop(local_rank, place, late)
                elif place.killed_s is not None and now_s - place.killed_s >= ENDED_S:
                    place.killed_s = None
                    why = f"local rank {local_rank} was killed {ENDED_S:g} s ago and is still there"
                    self._gave_up(self._generation, why)
            waiting = any(p.waited_for for p in self._places)
        return 0.05 if waiting else None

    # ---- one rank

    def _note_ready(self, pid: int, line: Line, generation: int) -> None:
        for place in self._places:
            if place.pid == pid:
                place.line, place.ready_in = line, generation

    def _note_obeyed(self, pid: int, message: FromRank) -> None:
        for place in self._places:
            if place.pid == pid and message.generation == self._generation:
                place.heard = True
                place.released |= isinstance(message, Released)

    def _order(self, local_rank: int, place: Place) -> None:
        place.ordered_s, place.heard, place.released = self._clock(), False, False
        place.killed_s = None
        order = Reform(
            generation=self._generation, environment=dict(self._environments[local_rank])
        )
        if place.line is None or not place.line.send(order):
            self._drop(local_rank, place, "does not listen")

    def _drop(self, local_rank: int, place: Place, why: str) -> None:
        """Kill it; another takes its place when its end is told (`ended`)."""
        if place.pid is None or not self._forks.able(local_rank):
            why = f"local rank {local_rank} {why}, and no shim stands before it"
            self._gave_up(self._generation, why)
            return
        self._say(f"local rank {local_rank} {why}: a fresh process takes its place")
        self._dropped.add(place.pid)
        place.killed_s = self._clock()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(place.pid, signal.SIGKILL)

    def _fill(self, local_rank: int) -> None:
        place = self._places[local_rank]
        try:
            place.pid = self._forks.replace(local_rank, self._environments[local_rank])
        except (OSError, EverstepError) as exc:
            self._gave_up(self._generation, f"local rank {local_rank}: no fresh process: {exc}")
            return
        place.line, place.ready_in, place.ordered_s, place.killed_s = None, 0, None, None
        if place.pid in self._lines:
            place.line, place.ready_in = self._lines[place.pid]

    def _tell(self) -> None:
        pids = [place.pid for place in self._places]
        known = [pid for pid in pids if pid is not None]
        if len(known) == len(pids):
            self._changed(self._generation, known)

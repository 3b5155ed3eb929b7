"""Runs `InPlace` for one launcher: its ranks' lines, its pool's news, and the time that passes.

Everything that may wait happens on one thread here; neither torchrun's main thread, nor the link's,
nor the pool's is held up.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Protocol

from everstep.launch.control import Ready
from everstep.launch.inplace import InPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from everstep.launch.control import FromRank, Line
    from everstep.launch.warm.pool import Pool
    from everstep.launch.warm.rank import WarmRank

log = logging.getLogger(__name__)

_PLAN_S = 20.0
"""How long the shim of a rank that ended is held while no plan comes; a survivor waits shorter."""
_FORK_S = 5.0


class Owner(Protocol):
    """The launcher."""

    def moved(self, generation: int, pids: Sequence[int]) -> None:
        """These processes, in order of local rank, are in the generation now."""
        ...

    def restart(self, why: str) -> None:
        """The ranks cannot go on in place: have torchrun restart them."""
        ...


class _NoForks:
    def able(self, local_rank: int) -> bool:  # noqa: ARG002  as the protocol has it
        return False

    def replace(self, local_rank: int, environment: Mapping[str, str]) -> int:
        raise OSError(f"no warm pool (for local rank {local_rank}, {len(environment)} variables)")


class _PoolForks:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def able(self, local_rank: int) -> bool:
        return local_rank in self._pool.ranks()

    def replace(self, local_rank: int, environment: Mapping[str, str]) -> int:
        return self._pool.replace(local_rank, environment, timeout_s=_FORK_S)


class Reforming:
    """The launcher's `InPlace`, with the world around it. Nothing here blocks its caller."""

    def __init__(self, pool: Pool | None, owner: Owner, say: Callable[[str], None]) -> None:
        """Start the thread."""
        self._pool = pool
        self._owner = owner
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._ended_s: float | None = None  # when a rank ended that no plan has followed yet
        self._sparing = 0  # the generation whose other ranks live on until then
        self._restarting = False
        self._it = InPlace(
            _NoForks() if pool is None else _PoolForks(pool),
            changed=owner.moved,
            gave_up=lambda _, why: self._give_up(why),
            say=say,
        )
        self._thread = threading.Thread(target=self._run, name="everstep-inplace", daemon=True)
        if pool is not None:
            pool.events.on_end = self._rank_ended
        self._thread.start()

    def started(self, generation: int, pids: Sequence[int]) -> None:
        """Torchrun has started these ranks."""
        self._restarting, self._ended_s, self._sparing = False, None, 0
        self._it.started(generation, pids)

    def reserve(self, generation: int) -> bool:
        """Return whether the ranks of this generation can leave it in place; `join` must follow."""
        return not self._restarting and self._it.reserve(generation)

    def spares(self, generation: int) -> bool:
        """Return whether the siblings of a rank that ended are to live on, for a plan to come.

        Takes no lock: it is asked by who holds one that is wanted here.
        """
        return self._sparing == generation

    def absorbs(self, pid: int) -> bool:
        """Return whether a rank's end is no failure of a generation: it is being replaced."""
        return self._it.absorbs(pid)

    def join(self, generation: int, environments: Sequence[Mapping[str, str]]) -> None:
        """Take all ranks into the generation, each with its environment."""
        self._ended_s, self._sparing = None, 0
        self._calls.put(lambda: self._it.order(generation, environments))

    def stop(self) -> None:
        """The ranks are to end: what is held is let go."""
        self._restarting = True
        self._let_go()

    def close(self) -> None:
        """End the thread."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_FORK_S + 1.0)

    # ---- news

    def heard(self, line: Line, message: FromRank | None) -> None:
        """A rank said something, or hung up (None)."""
        if isinstance(message, Ready) and self._pool is not None and not self._restarting:
            self._pool.hold(message.local_rank, on=True)
        self._it.heard(line, message)

    def _rank_ended(self, rank: WarmRank, code: int, held: bool) -> None:  # noqa: FBT001  the pool's
        if not held or self._pool is None:
            return
        if self._restarting:
            self._pool.release(rank.local_rank)
        elif code == 0:
            self._calls.put(lambda: self._finished(rank))
        else:
            self._calls.put(lambda: self._ended(rank.pid))

    def _finished(self, rank: WarmRank) -> None:
        over = self._it.finished(rank.pid)
        if (over or self._restarting) and self._pool is not None:
            self._pool.release(rank.local_rank)

    def _ended(self, pid: int) -> None:
        generation = self._it.ended(pid)
        if not generation:
            return
        self._ended_s = time.monotonic()
        if self._it.why_not(generation) is None:
            self._sparing = generation

    # ---- the thread

    def _run(self) -> None:
        timeout_s: float | None = 1.0
        while True:
            call: Callable[[], object] | None = self._tick
            with contextlib.suppress(queue.Empty):
                call = self._calls.get(timeout=timeout_s)
            if call is None:
                return
            try:
                call()
                timeout_s = self._tick()
            except Exception:  # the launcher's only hope of recovering in place must go on
                log.exception("forming anew in place failed")
                self._give_up("an error of everstep's own, see above")

    def _tick(self) -> float:
        if self._ended_s is not None and time.monotonic() - self._ended_s > _PLAN_S:
            self._give_up(f"no plan followed within {_PLAN_S:.0f} s")
        return self._it.tick() or 1.0

    def _give_up(self, why: str) -> None:
        self._ended_s, self._sparing = None, 0
        if not self._restarting:
            self._restarting = True
            self._owner.restart(why)
        self._let_go()

    def _let_go(self) -> None:
        if self._pool is None:
            return
        self._pool.hold(on=False)
        for local_rank in self._pool.ranks():
            self._pool.release(local_rank)

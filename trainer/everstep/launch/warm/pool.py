"""The launcher's side of the warm pool: who is behind which shim, and whether it may be forked.

One thread does all the talking. A rank's life: its shim asks; the nursery forks it, or the shim is
told to become the interpreter that torchrun meant ("cold"). When a rank ends its shim is told how,
and ends likewise. While a rank is *held* its shim is told nothing: `Events.on_end` says that it has
ended, and `Pool.replace` puts another one behind the same shim, which torchrun does not notice.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from everstep.launch import reaper
from everstep.launch.warm import frames
from everstep.launch.warm.berth import Berth, Order, PoolError
from everstep.launch.warm.door import Door
from everstep.launch.warm.loop import Loop
from everstep.launch.warm.nest import Spec
from everstep.launch.warm.nests import Nests
from everstep.launch.warm.rank import WarmRank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

log = logging.getLogger(__name__)

NURSERY_WAIT_S = 20.0
_SEND_S, _STOP_POLL_S = 5.0, 0.2
_CREDENTIALS = struct.Struct("3i")


@dataclass(slots=True)
class Events:
    """What the pool tells, one after the other on a thread of their own.

    `on_born(rank)`: it runs behind its shim, as the first one there or as a replacement.
    `on_end(rank, code, held)`: it has ended, with an exit code or, negative, by a signal; when
    `held`, its shim waits for `Pool.replace` or `Pool.release`.
    """

    on_born: Callable[[WarmRank], None] = field(default=lambda _: None)
    on_end: Callable[[WarmRank, int, bool], None] = field(default=lambda *_: None)


class Pool:
    """Gives torchrun an executable (`PYTHON_EXEC`) behind which warm ranks run.

    `say` gets one readable line for each new reason why ranks start cold. Raises NoDoorError.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.events = Events()
        self._say = say
        self._said: set[str] = set()
        self._door = Door()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._door.socket))
        self._listener.listen(128)
        self._loop = Loop("everstep-pool")
        self._changed = threading.Condition()
        self._berths: dict[int, Berth] = {}  # by the shim's pid
        self._held: set[int] = set()
        self._all_held = False
        self._living: dict[int, Berth] = {}  # by the rank's pid
        self._nests = Nests(self._loop, self, self._say_once)
        self._owner = ThreadPoolExecutor(1, "everstep-pool-events")
        self._closed = threading.Event()

    # ---- from any thread but the pool's own

    def start(self, spec: Spec) -> None:
        """Start the first nursery, and serve; returns at once."""
        self._loop.watch(self._listener, self._accept)
        self._loop.call(lambda: self._nests.build(spec))
        self._loop.start()
        threading.Thread(target=self._watch_stops, name="everstep-stops", daemon=True).start()

    @property
    def executable(self) -> Path:
        """What torchrun shall start instead of Python."""
        return self._door.executable

    @property
    def folder(self) -> Path:
        """The private folder that `close` removes."""
        return self._door.folder

    @property
    def ready(self) -> bool:
        """Whether a rank that is asked for now is forked at once, unless it turns out stale."""
        nest = self._nests.current
        return nest is not None and nest.ready

    def ranks(self) -> dict[int, WarmRank]:
        """Return the rank behind each shim that lives, by local rank; it may have ended."""
        with self._changed:
            return {b.local_rank: b.rank for b in self._berths.values() if b.rank and not b.gone}

    def nurseries(self) -> list[int]:
        """Return the pids of the nurseries that live."""
        return self._nests.pids()

    def behind(self, shim: int, timeout_s: float = 30.0) -> WarmRank | None:
        """Return the rank behind torchrun's child `shim`; None when that child is the rank itself.

        Waits until that is known. None, too, for a child that ended before it was known.
        """
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while (left_s := end_s - time.monotonic()) > 0:
                berth = self._berths.get(shim)
                if berth is not None and (berth.cold or berth.rank):
                    return berth.rank
                if reaper.has_ended(shim):
                    return None
                self._changed.wait(min(left_s, 0.1))
        return None

    def hold(self, local_rank: int | None = None, *, on: bool) -> None:
        """Hold one rank, or all of them, from now on, or no longer.

        A held rank's end is told to `Events.on_end` alone; its shim lives on. One that has ended
        while it was held waits for `replace` or `release` even if it is held no longer.
        """
        with self._changed:
            if local_rank is None:
                self._all_held = on
                self._held.clear()
            elif on:
                self._held.add(local_rank)
            else:
                self._held.discard(local_rank)

    def replace(
        self, local_rank: int, environ: Mapping[str, str], *, timeout_s: float = 10.0
    ) -> int:
        """Fork another rank behind the shim of this one; return its pid. From any thread.

        It starts as the first one did, with these variables changed. One that lives is killed
        first. Raises PoolError, an OSError, when there is no such rank, it was told to its shim as
        ended, or the nursery can't fork it; its shim then waits for `replace` or `release`.
        """
        order = Order(environ)
        self._loop.call(lambda: self._replace(local_rank, order))
        try:
            return order.born.result(timeout_s)
        except TimeoutError as exc:
            raise PoolError(f"local rank {local_rank}: no new rank in {timeout_s:.0f} s") from exc

    def release(self, local_rank: int) -> None:
        """Let the shim of a held rank that has ended end as the rank did; else do nothing."""

        def release() -> None:
            berth = self._berth_of(local_rank)
            if berth and berth.rank and berth.rank.code is not None and not berth.order:
                berth.tell_end(berth.rank.code)

        self._loop.call(release)

    def close(self) -> None:
        """End the nurseries, and the ranks with them, and remove the folder."""
        self._closed.set()
        self._loop.end(self._close, 10.0)
        self._owner.shutdown(wait=False)
        self._listener.close()
        self._door.close()

    # ---- shims

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.settimeout(_SEND_S)
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(raw)
        berth = Berth(sock, frames.Reader(sock), pid)
        with self._changed:
            for old in [b for b in self._berths.values() if b.cold and reaper.has_ended(b.shim)]:
                del self._berths[old.shim]
            self._berths[pid] = berth
        self._loop.watch(sock, lambda: self._hear_shim(berth))

    def _hear_shim(self, berth: Berth) -> None:
        messages = berth.reader.read_or_end()
        for message in messages or ():
            berth.ask = message
            berth.local_rank = int(frames.environment(message).get(b"LOCAL_RANK", b"-1"))
            self._place(berth)
        if messages is None:
            self._shim_gone(berth)

    def _place(self, berth: Berth) -> None:
        """Have it forked, let it wait for a nursery that still loads, or let it start cold."""
        ask = berth.ask
        if ask is None:
            raise AssertionError("only who has asked is placed")
        nest = self._nests.current
        if nest is None:
            self._cold(berth, self._nests.off or "no nursery runs")
            return
        spec = _spec(ask)
        if why := nest.spec.differs(spec):
            self._cold(berth, why)
            self._nests.build(spec)
        elif nest.ready:
            self._nests.fork(nest, berth.shim, ask.fields, ask.fds)
        elif not berth.waits:
            berth.waits = True
            self._loop.call_later(NURSERY_WAIT_S, lambda: self._lose_patience(berth))

    def _lose_patience(self, berth: Berth) -> None:
        if berth.waits:
            self._cold(berth, f"the nursery has not loaded in {NURSERY_WAIT_S:.0f} s")

    def _cold(self, berth: Berth, why: str) -> None:
        berth.waits = False
        if berth.order is not None:
            order, berth.order = berth.order, None
            order.fail(f"local rank {berth.local_rank} is not replaced: {why}")
            return
        self._say_once(f"ranks start cold: {why}")
        berth.tell("cold")
        with self._changed:
            berth.cold = True
            self._changed.notify_all()

    def _tell_owner(self, event: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                event()
            except Exception:  # the owner's bug must not end all later news
                log.exception("everstep: warm pool: an event was mishandled")

        self._owner.submit(guarded)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _shim_gone(self, berth: Berth) -> None:
        """It became its rank, ended as its rank did, or was killed: then its rank goes, too."""
        self._loop.drop(berth.sock)
        berth.gone, berth.waits = True, False
        for fd in berth.ask.fds if berth.ask else ():
            os.close(fd)
        if berth.rank is not None and berth.rank.code is None:
            reaper.kill_session(berth.rank.pid)
        if berth.order is not None:
            self._cold(berth, "its shim has ended")
        if berth.cold:
            return  # whoever asks `behind` may still come
        self._forget(berth)

    def _forget(self, berth: Berth) -> None:
        with self._changed:
            if self._berths.get(berth.shim) is berth:
                del self._berths[berth.shim]
            self._changed.notify_all()

    # ---- what the nurseries tell

    def settled(self) -> None:
        """Place who has waited for a nursery."""
        for berth in [b for b in self._berths.values() if b.waits]:
            berth.waits = False
            self._place(berth)

    def refused(self, shim: int, why: str) -> None:
        """Let a shim's rank start cold, or its replacement fail."""
        if (berth := self._berths.get(shim)) is not None:
            self._cold(berth, why)

    def born(self, shim: int, pid: int, pidfd: int) -> None:
        """Put a rank behind its shim."""
        berth = self._berths.get(shim)
        if berth is None or berth.gone:
            os.close(pidfd)
            reaper.kill_session(pid)
            return
        rank = WarmRank(berth.local_rank, shim, pid, pidfd)
        self._living[pid] = berth
        with self._changed:
            berth.rank = rank
            self._changed.notify_all()
        berth.tell("born", {"pid": frames.whole(pid)}, [rank.share()])
        order, berth.order = berth.order, None
        if order is not None:
            order.born.set_result(pid)
        self._tell_owner(lambda: self.events.on_born(rank))

    def ended(self, pid: int, code: int) -> None:
        """Tell the shim, or the owner of a held rank, how its rank has ended."""
        berth = self._living.pop(pid, None)
        if berth is None or (rank := berth.rank) is None:
            return  # its shim had gone before it was born
        held = not berth.gone and (self._is_held(berth) or berth.order is not None)
        rank.end(code)
        if held:
            berth.tell("gone")
        elif not berth.gone:
            berth.tell_end(code)
        self._tell_owner(lambda: self.events.on_end(rank, code, held))
        if held and berth.order is not None:
            self._carry_out(berth, berth.order)

    def _is_held(self, berth: Berth) -> bool:
        return self._all_held or berth.local_rank in self._held

    # ---- replacing

    def _replace(self, local_rank: int, order: Order) -> None:
        berth = self._berth_of(local_rank)
        if berth is None or (rank := berth.rank) is None:
            order.fail(f"local rank {local_rank} is behind no shim that lives")
        elif berth.told_end or berth.order is not None:
            order.fail(f"local rank {local_rank} was released, or is being replaced")
        elif rank.code is None:
            berth.order = order  # carried out when it has ended
            rank.send(signal.SIGKILL)
        else:
            berth.order = order
            self._carry_out(berth, order)

    def _carry_out(self, berth: Berth, order: Order) -> None:
        nest, ask = self._nests.current, berth.ask
        if nest is None or ask is None or not nest.ready:
            self._cold(berth, self._nests.off or "its nursery loads")
            return
        environ = frames.environment(ask)
        environ.update({os.fsencode(k): os.fsencode(v) for k, v in order.environ.items()})
        entries = [name + b"=" + value for name, value in environ.items()]
        fields = {**ask.fields, "environ": entries}
        if why := nest.spec.differs(_spec(frames.Message("", fields, ask.fds))):
            self._cold(berth, why)
        else:
            self._nests.fork(nest, berth.shim, fields, ask.fds)

    def _berth_of(self, local_rank: int) -> Berth | None:
        berths = [b for b in self._berths.values() if b.local_rank == local_rank and not b.gone]
        return berths[-1] if berths else None

    def _watch_stops(self) -> None:
        """Stop a rank while its shim is stopped: SIGSTOP can't be passed on by who gets it."""
        while not self._closed.wait(_STOP_POLL_S):
            for rank in self.ranks().values():
                if number := _stopped_or_continued(rank.shim):
                    rank.send(number)

    def _close(self) -> None:
        self._nests.close()
        for pid in list(self._living):
            self.ended(pid, -signal.SIGKILL)
        for berth in list(self._berths.values()):
            if not berth.gone:
                self._shim_gone(berth)


def _stopped_or_continued(shim: int) -> int | None:
    """Return SIGSTOP or SIGCONT when that is what has last come over it since the last call."""
    try:
        found = os.waitid(os.P_PID, shim, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return signal.SIGSTOP if found.si_code == os.CLD_STOPPED else signal.SIGCONT


def _spec(ask: frames.Message) -> Spec:
    cwd = os.readlink(f"/proc/self/fd/{ask.fds[-1]}")  # noqa: PTH115  a name, not a file
    return Spec(tuple(ask.fields["argv"]), frames.environment(ask), cwd)

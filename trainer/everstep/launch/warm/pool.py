"""The launcher's side of the warm pool: who is behind which shim, and whether it may be forked.

One thread does all the talking. A rank's life: its shim asks; the nursery forks it, or the shim is
told to become the interpreter that torchrun meant ("cold"). When a rank ends its shim is told how,
and ends likewise. While a rank is *held* its shim is told nothing: `Events.on_end` says that it has
ended, and `Pool.replace` puts another one behind the same shim, which torchrun does not notice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from everstep.launch import reaper
from everstep.launch.warm import frames
from everstep.launch.warm.door import Door
from everstep.launch.warm.loop import Loop
from everstep.launch.warm.nest import Nest, Spec
from everstep.sdk.errors import EverstepError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

NURSERY_WAIT_S = 20.0
_MOST_DEATHS = 3
_SEND_S, _STOP_POLL_S = 5.0, 0.5
_CREDENTIALS = struct.Struct("3i")


class PoolError(EverstepError):
    """The pool cannot do what it was asked for."""


class WarmRank:
    """A rank forked by the pool, living or ended, and the shim that torchrun takes for it."""

    def __init__(self, local_rank: int, shim: int, pid: int, pidfd: int) -> None:
        self.local_rank = local_rank
        self.shim = shim
        self.pid = pid
        self.code: int | None = None
        self._pidfd = pidfd
        self._ended = threading.Event()

    def wait_end(self) -> int:
        """Wait until it has ended; return its exit code, or its signal's number, negated.

        -SIGKILL when it went down with its nursery, which alone could have told.
        """
        self._ended.wait()
        return -signal.SIGKILL if self.code is None else self.code

    def send(self, number: int) -> None:
        """Send a signal to its process group; nothing happens when it has ended."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, 0)
                os.killpg(self.pid, number)

    def end(self, code: int) -> None:
        """Put down how it has ended; the pool's own."""
        self.code = code
        os.close(self._pidfd)
        self._ended.set()

    def share(self) -> int:
        """Return its pidfd, to be passed on at once; the pool's own."""
        return self._pidfd


@dataclass(slots=True, eq=False)
class _Berth:
    """One shim, and who is behind it."""

    sock: socket.socket
    reader: frames.Reader
    shim: int
    local_rank: int = -1
    ask: frames.Message | None = None
    waits: bool = False
    cold: bool = False
    gone: bool = False  # the shim has ended
    told_end: bool = False
    rank: WarmRank | None = None
    replacing: Future[int] | None = None


@dataclass(slots=True)
class Events:
    """What the pool tells, on its own thread: nothing here may wait for the pool, or for long.

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
        self._berths: dict[int, _Berth] = {}  # by the shim's pid
        self._held: set[int] = set()
        self._all_held = False
        self._nests: dict[Nest, dict[int, _Berth]] = {}  # and who of it is behind which shim
        self._nest: Nest | None = None
        self._deaths = 0
        self._off: str | None = None
        self._closed = threading.Event()

    # ---- from any thread but the pool's own

    def start(self, spec: Spec) -> None:
        """Start the first nursery, and serve; returns at once."""
        self._loop.watch(self._listener, self._accept)
        self._loop.call(lambda: self._build(spec))
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
        nest = self._nest
        return nest is not None and nest.ready

    def ranks(self) -> dict[int, WarmRank]:
        """Return the rank behind each shim that lives, by local rank; it may have ended."""
        with self._changed:
            return {b.local_rank: b.rank for b in self._berths.values() if b.rank and not b.gone}

    def nurseries(self) -> list[int]:
        """Return the pids of the nurseries that live."""
        return [nest.pid for nest in list(self._nests)]

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
        """Fork another rank behind the shim of a held one that has ended; return its pid.

        It starts as the first one did, with these variables changed. Raises PoolError when there
        is no such rank, it lives, or the nursery can't fork it; its shim then still waits.
        """
        future: Future[int] = Future()
        self._loop.call(lambda: self._replace(local_rank, environ, future))
        try:
            return future.result(timeout_s)
        except TimeoutError as exc:
            raise PoolError(f"local rank {local_rank}: no new rank in {timeout_s:.0f} s") from exc

    def release(self, local_rank: int) -> None:
        """Let the shim of a held rank that has ended end as the rank did; else do nothing."""

        def release() -> None:
            berth = self._berth_of(local_rank)
            if berth and berth.rank and berth.rank.code is not None and not berth.replacing:
                self._tell_end(berth, berth.rank.code)

        self._loop.call(release)

    def close(self) -> None:
        """End the nurseries, and the ranks with them, and remove the folder."""
        self._closed.set()
        self._loop.end(self._close, 10.0)
        self._listener.close()
        self._door.close()

    # ---- shims

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.settimeout(_SEND_S)
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(raw)
        berth = _Berth(sock, frames.Reader(sock), pid)
        with self._changed:
            for old in [b for b in self._berths.values() if b.cold and reaper.has_ended(b.shim)]:
                del self._berths[old.shim]
            self._berths[pid] = berth
        self._loop.watch(sock, lambda: self._hear_shim(berth))

    def _hear_shim(self, berth: _Berth) -> None:
        messages = _read(berth.reader)
        for message in messages or ():
            berth.ask = message
            berth.local_rank = int(_environ(message).get(b"LOCAL_RANK", b"-1"))
            self._place(berth)
        if messages is None:
            self._shim_gone(berth)

    def _place(self, berth: _Berth) -> None:
        """Have it forked, let it wait for a nursery that still loads, or let it start cold."""
        ask = berth.ask
        if ask is None:
            raise AssertionError("only who has asked is placed")
        nest = self._nest
        if nest is None:
            self._cold(berth, self._off or "no nursery runs")
            return
        spec = _spec(ask)
        if why := nest.spec.differs(spec):
            self._cold(berth, why)
            self._build(spec)
        elif nest.ready:
            self._fork(nest, berth, ask.fields)
        elif not berth.waits:
            berth.waits = True
            self._loop.call_later(NURSERY_WAIT_S, lambda: self._lose_patience(berth))

    def _lose_patience(self, berth: _Berth) -> None:
        if berth.waits:
            self._cold(berth, f"the nursery has not loaded in {NURSERY_WAIT_S:.0f} s")

    def _cold(self, berth: _Berth, why: str) -> None:
        berth.waits = False
        if berth.replacing is not None:
            berth.replacing.set_exception(PoolError(f"local rank {berth.local_rank}: {why}"))
            berth.replacing = None
            return
        self._say_once(f"ranks start cold: {why}")
        self._tell(berth, "cold")
        with self._changed:
            berth.cold = True
            self._changed.notify_all()

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _tell(self, berth: _Berth, kind: str, code: int | None = None) -> None:
        fields = {} if code is None else {"code": frames.whole(code)}
        with contextlib.suppress(OSError):  # a shim that has died is noticed where it is read
            frames.send(berth.sock, kind, fields)

    def _tell_end(self, berth: _Berth, code: int) -> None:
        berth.told_end = True
        self._tell(berth, "end", code)

    def _shim_gone(self, berth: _Berth) -> None:
        """It became its rank, ended as its rank did, or was killed: then its rank goes, too."""
        self._loop.drop(berth.sock)
        berth.gone, berth.waits = True, False
        for fd in berth.ask.fds if berth.ask else ():
            os.close(fd)
        if berth.rank is not None and berth.rank.code is None:
            reaper.kill_session(berth.rank.pid)
        if berth.cold:
            return  # whoever asks `behind` may still come
        self._forget(berth)

    def _forget(self, berth: _Berth) -> None:
        with self._changed:
            if self._berths.get(berth.shim) is berth:
                del self._berths[berth.shim]
            self._changed.notify_all()

    # ---- nurseries

    def _build(self, spec: Spec) -> None:
        """Start a nursery for the next ranks; the one before stays until its own have ended."""
        self._retire()
        if self._off is not None:
            return
        try:
            nest = Nest.start(spec)
        except (OSError, RuntimeError) as exc:
            self._switch_off(f"no nursery can be started: {exc}")
            return
        self._nests[nest] = {}
        self._nest = nest
        self._loop.watch(nest.sock, lambda: self._hear_nest(nest))

    def _retire(self) -> None:
        nest, self._nest = self._nest, None
        if nest is not None and not self._nests.get(nest):
            self._drop_nest(nest)

    def _drop_nest(self, nest: Nest) -> None:
        if self._nests.pop(nest, None) is not None:
            self._loop.drop(nest.sock)
            nest.close()

    def _switch_off(self, why: str) -> None:
        self._off = why
        self._retire()
        self._say_once(f"no warm ranks from now on: {why}")
        for berth in self._waiting():
            self._cold(berth, why)

    def _waiting(self) -> list[_Berth]:
        return [berth for berth in self._berths.values() if berth.waits]

    def _hear_nest(self, nest: Nest) -> None:
        messages = _read(nest.reader)
        for message in messages or ():
            self._take(nest, message)
        if messages is None and nest in self._nests:
            self._nest_died(nest)

    def _take(self, nest: Nest, message: frames.Message) -> None:
        match message.kind:
            case "ready":
                nest.ready = True
                if nest is self._nest:
                    for berth in self._waiting():
                        berth.waits = False
                        self._place(berth)
            case "useless":
                self._switch_off(message.text("why"))
            case "refused":
                self._refused(nest, message)
            case "born":
                self._born(nest, message)
            case _:  # "ended"
                berth = self._nests[nest].pop(message.number("pid"))
                self._rank_ended(berth, message.number("code"))
                if nest is not self._nest and not self._nests[nest]:
                    self._drop_nest(nest)

    def _nest_died(self, nest: Nest) -> None:
        """Its ranks died with it, by PR_SET_PDEATHSIG; what they had started is still there."""
        ranks = self._nests[nest]
        self._drop_nest(nest)
        self._deaths += 1
        self._say(f"nursery {nest.pid} has died, and with it {len(ranks)} ranks")
        for pid, berth in ranks.items():
            reaper.kill_session(pid)
            self._rank_ended(berth, -signal.SIGKILL)
        if nest is not self._nest:
            return
        self._nest = None
        if self._deaths < _MOST_DEATHS:
            self._build(nest.spec)
        else:
            self._switch_off(f"{_MOST_DEATHS} nurseries have died")
        for berth in self._waiting():
            berth.waits = False
            self._place(berth)

    # ---- ranks

    def _fork(self, nest: Nest, berth: _Berth, fields: Mapping[str, Sequence[bytes]]) -> None:
        ask = {"id": frames.whole(berth.shim), **fields}
        try:
            frames.send(nest.sock, "fork", ask, berth.ask.fds if berth.ask else ())
        except OSError as exc:
            self._cold(berth, f"nursery {nest.pid} does not listen: {exc}")

    def _refused(self, nest: Nest, message: frames.Message) -> None:
        berth = self._berths.get(message.number("id"))
        why = message.text("why")
        if berth is not None:
            self._cold(berth, why)
        if message.number("for_good"):
            self._switch_off(why)
        elif nest is self._nest:
            self._build(nest.spec)

    def _born(self, nest: Nest, message: frames.Message) -> None:
        pid, (pidfd,) = message.number("pid"), message.fds
        shim = message.number("id")
        berth = self._berths.get(shim)
        if berth is None or berth.gone:
            berth = _Berth(nest.sock, nest.reader, shim, gone=True)
        rank = WarmRank(berth.local_rank, shim, pid, pidfd)
        self._nests[nest][pid] = berth
        with self._changed:
            berth.rank = rank
            self._changed.notify_all()
        if berth.gone:
            reaper.kill_session(pid)
            return
        with contextlib.suppress(OSError):
            frames.send(berth.sock, "born", {"pid": frames.whole(pid)}, [rank.share()])
        replacing, berth.replacing = berth.replacing, None
        if replacing is not None:
            replacing.set_result(pid)
        self.events.on_born(rank)

    def _rank_ended(self, berth: _Berth, code: int) -> None:
        rank = berth.rank
        if rank is None:
            raise AssertionError("only who was born ends")
        held = not berth.gone and (self._all_held or berth.local_rank in self._held)
        rank.end(code)
        if held:
            self._tell(berth, "gone")
        elif not berth.gone:
            self._tell_end(berth, code)
        self.events.on_end(rank, code, held)

    def _replace(self, local_rank: int, changes: Mapping[str, str], future: Future[int]) -> None:
        berth = self._berth_of(local_rank)
        nest = self._nest
        if berth is None or berth.rank is None or berth.ask is None:
            why = "is behind no shim that lives"
        elif berth.rank.code is None:
            why = f"lives still (pid {berth.rank.pid})"
        elif berth.told_end or berth.replacing is not None:
            why = "was released, or is being replaced"
        elif nest is None or not nest.ready:
            why = f"has no nursery: {self._off or 'it loads'}"
        else:
            environ = _environ(berth.ask)
            environ.update({os.fsencode(k): os.fsencode(v) for k, v in changes.items()})
            entries = [name + b"=" + value for name, value in environ.items()]
            fields = {**berth.ask.fields, "environ": entries}
            why = nest.spec.differs(_spec(frames.Message("", fields, berth.ask.fds))) or ""
            if not why:
                berth.replacing = future
                self._fork(nest, berth, fields)
                return
        future.set_exception(PoolError(f"local rank {local_rank} {why}"))

    def _berth_of(self, local_rank: int) -> _Berth | None:
        berths = [b for b in self._berths.values() if b.local_rank == local_rank and not b.gone]
        return berths[-1] if berths else None

    def _watch_stops(self) -> None:
        """Stop a rank while its shim is stopped: SIGSTOP can't be passed on by who gets it."""
        while not self._closed.is_set():
            try:
                found = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED)
            except ChildProcessError:
                found = None
            if found is None:
                self._closed.wait(_STOP_POLL_S)
                continue
            number = signal.SIGSTOP if found.si_code == os.CLD_STOPPED else signal.SIGCONT
            for rank in self.ranks().values():
                if rank.shim == found.si_pid:
                    rank.send(number)

    def _close(self) -> None:
        for nest in list(self._nests):
            self._drop_nest(nest)
        for berth in list(self._berths.values()):
            if not berth.gone:
                self._shim_gone(berth)


def _read(reader: frames.Reader) -> list[frames.Message] | None:
    try:
        return reader.read()
    except OSError:
        return None


def _environ(ask: frames.Message) -> dict[bytes, bytes]:
    pairs = (entry.partition(b"=") for entry in ask.fields["environ"])
    return {name: value for name, _, value in pairs}


def _spec(ask: frames.Message) -> Spec:
    cwd = os.readlink(f"/proc/self/fd/{ask.fds[-1]}")  # noqa: PTH115  a name, not a file
    return Spec(tuple(ask.fields["argv"]), _environ(ask), cwd)

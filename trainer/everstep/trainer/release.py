"""Gets a rank out of a collective whose peers are gone or stopped.

gloo: a thread that is blocked in one comes out when this process shuts down its own connections;
aborting the group does not wake it (torch 2.13). Which connections are gloo's is known from what
was opened while a group was made. NCCL: all communicators are aborted. What torch remembers of the
meshes over those groups is disowned with them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import select
import socket
import stat
import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAKER = "_new_process_group_helper"


class Connections:
    """The connections of every process group that is made while `watching`."""

    def __init__(self) -> None:
        self._opened: dict[int, int] = {}  # descriptor -> inode
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note what groups open, whoever makes them: the session, a device mesh, the script."""
        plain = getattr(c10d, _MAKER)

        @functools.wraps(plain)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before = _sockets()
            try:
                return plain(*args, **kwargs)
            finally:
                with self._lock:
                    self._opened |= dict(_sockets().items() - before.items())

        setattr(c10d, _MAKER, watched)
        try:
            yield
        finally:
            setattr(c10d, _MAKER, plain)

    def broken(self) -> bool:
        """Return whether a peer hung up on one of them, which gloo may have closed since."""
        now = _sockets()
        with self._lock:
            opened = dict(self._opened)
        return any(now.get(fd) != inode or _hung_up(fd) for fd, inode in opened.items())

    def forget(self) -> None:
        """The groups are gone."""
        with self._lock:
            self._opened.clear()

    def shut_down(self) -> None:
        """Shut them down, which fails every collective in progress. Safe from any thread.

        For reading only: gloo fails all that waits when a peer seems to have hung up. A write that
        fails loses, once in some 25 times, the send that its own thread had just begun for the
        collective, which then waits for ever (torch 2.13).
        """
        now = _sockets()
        with self._lock:
            mine = [fd for fd, inode in self._opened.items() if now.get(fd) == inode]
        for fd in mine:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                sock.shutdown(socket.SHUT_RD)
        if dist.is_initialized() and dist.get_backend() != "gloo":
            c10d._abort_process_group()  # noqa: SLF001  the only door to ncclCommAbort


def lost_a_peer(exc: BaseException, connections: Connections) -> bool:
    """Return whether an error came of a peer's end rather than of this rank's own code."""
    return connections.broken() or isinstance(exc, dist.DistError)


def disown_meshes() -> None:
    """Have no mesh that there is be taken for one that is made later.

    torch keeps what DTensor operations come to by mesh, in caches of each thread, and to it two
    meshes of the same ranks are equal. What it kept knows which part is this rank's, and in the
    next generation a rank may have another number. The old meshes' groups are let go as well.
    """
    # This thread's caches alone can be cleared; what others keep matches nothing any more.
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch's gap
    for thing in gc.get_objects():
        if type(thing) is DeviceMesh:  # isinstance would ask lazy proxies, which then load things
            thing._thread_id = id(thing)  # noqa: SLF001  part of what makes two of them equal
            thing._pg_registry.clear()  # noqa: SLF001  holds the groups' threads


def _hung_up(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    return bool(poll.poll(0))


def _sockets() -> dict[int, int]:
    """Return the connected internet sockets of this process: descriptor and inode.

    Not those that listen: gloo ends the process when its listener is shut down.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  one call, no objects
        with contextlib.suppress(OSError):
            what = os.stat(int(name))  # noqa: PTH116  a descriptor has no path
            if stat.S_ISSOCK(what.st_mode) and _is_connection(int(name)):
                found[int(name)] = what.st_ino
    return found


def _is_connection(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)

"""One shim, and who is behind it, as the pool's thread keeps it."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from everstep.launch.warm import frames
from everstep.sdk.errors import EverstepError

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

    from everstep.launch.warm.rank import WarmRank


class PoolError(EverstepError, OSError):
    """The pool cannot do what it was asked for."""


@dataclass(frozen=True, slots=True)
class Order:
    """Put another rank behind a shim, with these variables changed."""

    environ: Mapping[str, str]
    born: Future[int] = field(default_factory=Future)

    def fail(self, why: str) -> None:
        """Tell who gave the order why there will be no rank."""
        self.born.set_exception(PoolError(why))


@dataclass(slots=True, eq=False)
class Berth:
    """One shim: what it asked for, and the rank behind it, living or ended."""

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
    order: Order | None = None  # to put another rank here

    def tell(
        self, kind: str, fields: Mapping[str, Sequence[bytes]] = {}, fds: Sequence[int] = ()
    ) -> None:
        """Tell the shim something; one that has died is noticed where it is read."""
        with contextlib.suppress(OSError):
            frames.send(self.sock, kind, fields, fds)

    def tell_end(self, code: int) -> None:
        """Let the shim end as its rank has."""
        self.told_end = True
        self.tell("end", {"code": frames.whole(code)})

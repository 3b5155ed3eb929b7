"""A session's line to its launcher, and its hold on SIGTERM while it has something to save."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from everstep.trainer.orders import Orders
from everstep.trainer.sigterm import Sigterm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from everstep.trainer.emergency import Emergency


log = logging.getLogger(__name__)


class Launcher:
    """`orders` is a line that outlives the session; without it one is opened for the session."""

    def __init__(self, environ: Mapping[str, str], orders: Orders | None) -> None:
        self._environ = environ
        self._given = orders
        self._own: Orders | None = None
        self._sigterm: Sigterm | None = None

    @property
    def orders(self) -> Orders:
        """The line, which is opened now where it is not open yet."""
        if self._given is not None:
            return self._given
        if self._own is None:
            self._own = Orders(self._environ, lambda: None)
        return self._own

    def watch(self, emergency: Emergency, step: int) -> None:
        """From now on an emergency snapshot can be asked for; the session begins at `step`."""
        orders = self.orders
        if not orders.connected or self._sigterm is not None:
            return

        def decide() -> None:
            if orders.means_all():
                emergency.wait_done()

        self._sigterm = Sigterm(decide)
        if self._sigterm.arm():
            emergency.arm(step)
        else:
            log.info("SIGTERM has a handler here, or is not this thread's: no emergency snapshots")

    def leave(self, emergency: Emergency) -> None:
        """The session ends: what is asked for is saved first, in bounded time."""
        emergency.close()
        if self._sigterm is not None:
            self._sigterm.disarm()
            self._sigterm = None
        self.close()

    def close(self) -> None:
        """Hang up on a line that was opened for this session."""
        if self._own is not None:
            self._own.close()
            self._own = None

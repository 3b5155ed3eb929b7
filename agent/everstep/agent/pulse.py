"""When to look at the progress pages, and whether this process itself kept its appointments."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from everstep.agent.progress import Progress

log = logging.getLogger(__name__)

LATE_S = 1.0
_SHORTEST_NS = 50_000_000


class Pulse:
    """Looks every `look_s`, and at the moment at which a rank would have stood for too long.

    `ping` tells the service manager's watchdog, every `ping_s`, from here and nowhere else: no
    look, no ping. Whoever else looks in between (a heartbeat) puts the next appointment off.
    """

    def __init__(
        self,
        progress: Progress,
        *,
        look_s: float,
        ping_s: float | None,
        ping: Callable[[], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.late = 0
        self._progress = progress
        self._look_ns = int(look_s * 1e9)
        self._ping_ns = None if ping_s is None else int(ping_s * 1e9)
        self._ping = ping
        self._clock_ns = clock_ns
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns: int | None = None
        self._ping_due_ns = 0

    async def run(self, standstill: Callable[[], None]) -> None:
        """Look until cancelled; `standstill` is called when one must be told at once."""
        while True:
            self._alarm = self._loop.create_future()
            if self.look():
                standstill()
            await self._alarm

    def look(self) -> bool:
        """Look now; True when a standstill must be told at once."""
        now_ns = self._clock_ns()
        self._admit_lateness(now_ns)
        tell = self._progress.look(now_ns)
        if self._ping_ns is not None and now_ns >= self._ping_due_ns:
            self._ping_due_ns = now_ns + self._ping_ns
            self._ping()
        self._set_alarm(now_ns)
        return tell

    def _admit_lateness(self, now_ns: int) -> None:
        late_s = 0.0 if self._due_ns is None else (now_ns - self._due_ns) / 1e9
        if late_s > LATE_S:
            self.late += 1
            self._progress.start_anew(now_ns)
            log.warning("the agent stood still", extra={"for_s": round(late_s, 1)})

    def _set_alarm(self, now_ns: int) -> None:
        dues = [now_ns + self._look_ns]
        if (standstill_ns := self._progress.due_ns()) is not None:
            dues.append(standstill_ns)
        if self._ping_ns is not None:
            dues.append(self._ping_due_ns)
        self._due_ns = max(min(dues), now_ns + _SHORTEST_NS)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later((self._due_ns - now_ns) / 1e9, self._ring)

    def _ring(self) -> None:
        if not self._alarm.done():
            self._alarm.set_result(None)

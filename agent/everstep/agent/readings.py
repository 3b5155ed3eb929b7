"""One table of the latest readings, by who took them. Any thread may read it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from everstep.wire.messages import Reading


@dataclass(frozen=True, slots=True)
class _Batch:
    readings: tuple[Reading, ...]
    until_s: float


class Readings:
    """Keeps each source's last batch until the next one, or until it is too old to be true."""

    def __init__(
        self, *, max_series: int = 2000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._batches: dict[str, _Batch] = {}
        self._max_series = max_series
        self._clock = clock

    def put(self, source: str, readings: Sequence[Reading], *, keep_s: float) -> int:
        """Replace a source's readings; return how many there was no room for."""
        kept = tuple(readings[: self._max_series])
        self._batches[source] = _Batch(kept, self._clock() + keep_s)
        dropped = len(readings) - len(kept)
        if dropped:
            self.dropped[source] += dropped
        return dropped

    def latest(self) -> list[Reading]:
        """Return all readings that are not too old."""
        now_s = self._clock()
        batches = list(self._batches.values())
        return [r for batch in batches if now_s <= batch.until_s for r in batch.readings]

"""How far the coordinator's clock is from this node's, learned from heartbeats."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

_ROUNDING_S = 1e-6  # wall clock times are floats of some 1e9: a trip of nothing may come out below
_KEEP = 16
_DRIFT = 100e-6  # how fast two clocks may part, seconds a second
_STEP_S = 0.01


class Offset(NamedTuple):
    """`offset_s` is to be added to this node's clock to get the coordinator's, within `error_s`."""

    offset_s: float
    error_s: float


class _Trip(NamedTuple):
    offset: Offset
    at_mono_s: float


class ClockOffset:
    """Keeps the last round trips and believes the best: the one with the narrowest bound."""

    def __init__(self) -> None:
        self._trips: deque[_Trip] = deque(maxlen=_KEEP)
        self._base_s: float | None = None

    def add(
        self, sent_s: float, received_s: float, answered_s: float, back_s: float, *, mono_s: float
    ) -> None:
        """Take in one round trip: sent and back by this clock, the rest by the coordinator's.

        A step of this node's clock (`back_s` and `mono_s` part) makes all trips before worthless.
        """
        base_s = back_s - mono_s
        if self._base_s is not None and abs(base_s - self._base_s) > _STEP_S:
            self._trips.clear()
        self._base_s = base_s
        error_s = ((back_s - sent_s) - (answered_s - received_s)) / 2
        offset_s = ((received_s - sent_s) + (answered_s - back_s)) / 2
        if not (math.isfinite(offset_s) and math.isfinite(error_s) and error_s >= -_ROUNDING_S):
            return  # a clock was set during the trip, or the coordinator talks nonsense
        self._trips.append(_Trip(Offset(offset_s, max(0.0, error_s)), mono_s))

    def best(self, *, mono_s: float) -> Offset | None:
        """Return the best offset now, None before the first round trip; bounds widen with age."""
        aged = (
            Offset(t.offset.offset_s, t.offset.error_s + (mono_s - t.at_mono_s) * _DRIFT)
            for t in self._trips
        )
        return min(aged, key=lambda o: o.error_s, default=None)

    def forget(self) -> None:
        """Start anew, e.g. with another coordinator."""
        self._trips.clear()

"""A robust two-level detector: pure, in a few microseconds a step, and never fooled by a nan.

What is normal is learned from *good* values only, so that neither a spike nor a nan moves the bar
that it is measured against: the level is a median over the last few, the spread a median over how
far each was from the level before it (so that a loss on its way down has no spread to speak of).
Level 1 is an odd batch. Level 2 is a spike: several odd ones close together, or one whose loss and
gradient norm both jump, and in both cases higher than what this run has shown to shrug off: a run
on mixed data jumps all the time and is healthy.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = Literal["outlier", "spike", "non_finite", "shift"]

LEVEL_WINDOW, SPREAD_WINDOW, TAIL_WINDOW = 17, 128, 512
MIN_SPREAD = 0.005
"""The spread is never taken to be below this share of the level."""
TAIL_SHARE, TAIL_MARGIN = 0.98, 1.1
"""A spike is higher than the share of all strays (odd ones included), by this margin."""
NORM_WITHIN = 8
"""An odd gradient norm so many steps before a jump counts as part of it."""
_MAD_TO_SIGMA = 1.4826


class LossSpikeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[hooks.loss_spike]`."""

    policy: Literal["log", "skip_update"] = "log"
    min_good: int = 64
    deviations: float = 8.0
    min_rise: float = 0.1
    spike_rise: float = 0.5
    outliers: int = 3
    of_last: int = 6
    max_skips: int = 5
    shift_after: int = 32

    def __post_init__(self) -> None:
        """Raise ValueError for settings that contradict one another."""
        if not 8 <= self.min_good <= SPREAD_WINDOW:
            raise ValueError(f"min_good must be 8 to {SPREAD_WINDOW}, not {self.min_good}")
        if self.deviations <= 0 or self.min_rise <= 0 or self.spike_rise <= 0:
            raise ValueError("deviations, min_rise and spike_rise must be above 0")
        if not 1 <= self.outliers <= self.of_last:
            raise ValueError(f"outliers {self.outliers} must be 1 to of_last {self.of_last}")
        if self.shift_after <= self.of_last or self.max_skips < 1:
            raise ValueError("shift_after must be above of_last, max_skips 1 or more")


class Event(NamedTuple):
    """What one step showed; level 0 tells, 1 is an odd batch, 2 asks for action."""

    kind: Kind
    level: int
    loss: float
    usual: float
    deviations: float


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a detector knows, to survive a restart."""

    losses: list[float]
    strays: list[float]
    all_strays: list[float]
    norms: list[float]
    norm_strays: list[float]
    odd: list[int]
    odd_in_a_row: int
    steps_since_odd_norm: int


class Recent:
    """The last `size` values, in order of age and of height."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._size = size
        self._by_age: deque[float] = deque(values, maxlen=size)
        self._by_height = sorted(self._by_age)

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, value: float) -> None:
        """Take in a value; the oldest makes room."""
        if len(self._by_age) == self._size:
            old = self._by_age[0]
            del self._by_height[bisect_left(self._by_height, old)]
        self._by_age.append(value)
        insort(self._by_height, value)

    def quantile(self, share: float) -> float:
        """Return the value that `share` of the others are below, nan when there is none."""
        count = len(self._by_height)
        return self._by_height[min(count - 1, int(count * share))] if count else math.nan

    def values(self) -> list[float]:
        """Return the values, oldest first."""
        return list(self._by_age)


class Normal:
    """What one quantity usually is, and how far it strays from that."""

    def __init__(self, level: Iterable[float] = (), strays: Iterable[float] = ()) -> None:
        self.level = Recent(LEVEL_WINDOW, level)
        self.strays = Recent(SPREAD_WINDOW, strays)

    def __len__(self) -> int:
        return len(self.strays)

    def stray(self, value: float) -> float:
        """Return how far a value is above the usual level."""
        return value - self.level.quantile(0.5) if len(self.level) else 0.0

    @property
    def spread(self) -> float:
        """The usual distance as a standard deviation, with a floor: a flat curve has none."""
        floor = MIN_SPREAD * abs(self.level.quantile(0.5))
        return max(_MAD_TO_SIGMA * self.strays.quantile(0.5), floor, 1e-12)

    def add(self, value: float) -> None:
        """Take in a good value."""
        self.strays.add(abs(self.stray(value)))
        self.level.add(value)


class Detector:
    """Feed it every step's loss, reduced over all ranks, in order."""

    def __init__(self, config: LossSpikeConfig, *, warmup_steps: int = 0) -> None:
        self._config = config
        self.warmup_steps = warmup_steps
        self._forget()
        self._norm = Normal()
        self._steps_since_odd_norm = NORM_WITHIN

    def _forget(self) -> None:
        self._loss = Normal()
        self._all_strays = Recent(TAIL_WINDOW)
        self._odd: deque[int] = deque(maxlen=self._config.of_last)
        self._odd_in_a_row = 0

    def see(self, step: int, loss: float, grad_norm: float = math.nan) -> Event | None:
        """Return what is odd about this step, if anything."""
        usual = self._loss.level.quantile(0.5)
        if not math.isfinite(loss):
            return Event("non_finite", 2, loss, usual, math.inf)
        self._see_norm(grad_norm)
        stray = self._loss.stray(loss)
        shrugged_off = TAIL_MARGIN * self._all_strays.quantile(TAIL_SHARE)
        self._all_strays.add(stray)
        known = step > self.warmup_steps and len(self._loss) >= self._config.min_good
        if not (known and self._is_odd(stray, usual)):
            self._odd.append(0)
            self._odd_in_a_row = 0
            self._loss.add(loss)
            return None
        event = Event("outlier", 1, loss, usual, stray / self._loss.spread)
        return self._judge(event, rise=stray / abs(usual), unheard_of=stray > shrugged_off)

    def _is_odd(self, stray: float, usual: float) -> bool:
        if stray <= self._config.min_rise * abs(usual):
            return False
        return stray > self._config.deviations * self._loss.spread

    def _judge(self, event: Event, *, rise: float, unheard_of: bool) -> Event:
        self._odd.append(1)
        self._odd_in_a_row += 1
        if self._odd_in_a_row >= self._config.shift_after:
            # So long is no spike any more: the data or the run has changed, learn the new level.
            self._forget()
            return event._replace(kind="shift", level=0)
        several = sum(self._odd) >= self._config.outliers
        norm_too = rise > self._config.spike_rise and self._steps_since_odd_norm < NORM_WITHIN
        if unheard_of and (several or norm_too):
            return event._replace(kind="spike", level=2)
        return event

    def _see_norm(self, norm: float) -> None:
        self._steps_since_odd_norm = min(self._steps_since_odd_norm + 1, NORM_WITHIN)
        if math.isnan(norm):
            return
        known = len(self._norm) >= self._config.min_good
        if known and self._norm.stray(norm) > self._config.deviations * self._norm.spread:
            self._steps_since_odd_norm = 0
        elif math.isfinite(norm):
            self._norm.add(norm)

    def known(self) -> Known:
        """Return everything it knows."""
        return Known(
            losses=self._loss.level.values(),
            strays=self._loss.strays.values(),
            all_strays=self._all_strays.values(),
            norms=self._norm.level.values(),
            norm_strays=self._norm.strays.values(),
            odd=list(self._odd),
            odd_in_a_row=self._odd_in_a_row,
            steps_since_odd_norm=self._steps_since_odd_norm,
        )

    def restore(self, known: Known) -> None:
        """Know it again, so that the first step after a resume is judged too."""
        self._forget()
        self._loss = Normal(known.losses, known.strays)
        self._norm = Normal(known.norms, known.norm_strays)
        self._all_strays = Recent(TAIL_WINDOW, known.all_strays)
        self._odd.extend(known.odd)
        self._odd_in_a_row = known.odd_in_a_row
        self._steps_since_odd_norm = known.steps_since_odd_norm

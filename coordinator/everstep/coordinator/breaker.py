"""Stops mass eviction: many nodes failing at once have a common cause, and it is none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from everstep.coordinator.config import BreakerConfig


def evicted_lately(times_s: Iterable[float], *, now_s: float, config: BreakerConfig) -> int:
    """Return how many of these evictions fall into the window."""
    return sum(1 for at_s in times_s if now_s - at_s < config.window_s)


def holds(lately: int, *, nodes: int, config: BreakerConfig) -> bool:
    """Return whether one more of a job's `nodes` may go: at most `share`, but one always."""
    return lately + 1 <= max(1, int(nodes * config.share))

"""Stops mass eviction: many nodes failing at once have a common cause, and it is none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from everstep.coordinator.config import BreakerConfig


def may_evict(
    evicted_at_s: Iterable[float], *, nodes: int, now_s: float, config: BreakerConfig
) -> bool:
    """Return whether one more of a job's `nodes` may be evicted now.

    At most `share` of them within `window_s`, but one always.
    """
    lately = sum(1 for at_s in evicted_at_s if now_s - at_s < config.window_s)
    return lately + 1 <= max(1, int(nodes * config.share))

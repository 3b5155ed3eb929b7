"""Turns "what is wrong now", asked again and again, into findings that begin and end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from everstep.wire.messages import Finding


class Episodes:
    """Remembers what was wrong at the look before.

    >>> from everstep.sdk import Finding
    >>> hot = Finding(name="too hot", component="host", severity="error", summary="95 C", at_s=1.0)
    >>> episodes = Episodes()
    >>> [f.resolved for f in episodes.update({"hot": hot}, 1.0)]
    [False]
    >>> episodes.update({"hot": hot}, 2.0)
    []
    >>> [f.resolved for f in episodes.update({}, 3.0)]
    [True]
    """

    def __init__(self) -> None:
        self._open: dict[Hashable, Finding] = {}

    def update(self, wrong: Mapping[Any, Finding], at_s: float) -> list[Finding]:
        """Return what began, what got better or worse, and, `resolved`, what is over.

        The keys are the caller's own: what has the same key is the same trouble.
        """
        told = [f for key, f in wrong.items() if _news(self._open.get(key), f)]
        over = [
            msgspec.structs.replace(f, resolved=True, at_s=at_s)
            for key, f in self._open.items()
            if key not in wrong
        ]
        # An episode keeps the time at which it began.
        self._open = {
            key: f if _news(self._open.get(key), f) else self._open[key] for key, f in wrong.items()
        }
        return told + over


def _news(before: Finding | None, now: Finding) -> bool:
    if before is None:
        return True
    return (before.severity, before.suggested_action) != (now.severity, now.suggested_action)

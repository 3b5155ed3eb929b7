"""A port for somebody who binds it a moment later."""

from __future__ import annotations

import random
import socket

_RANGE = range(15_000, 32_000)
"""Below what Linux hands out by itself: nobody else's connection takes it in between."""
_TRIES = 100


def free_port() -> int:
    """Return a TCP port that nobody listens on. Raises OSError when none is found."""
    for port in random.sample(_RANGE, _TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise OSError(f"none of {_TRIES} ports between {_RANGE.start} and {_RANGE.stop} is free")

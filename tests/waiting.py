"""How tests wait for processes: by looking, with one generous deadline, and with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 90.0


def wait_until(what: str, true: Callable[[], T], timeout_s: float = DEADLINE_S) -> T:
    """Poll until it returns something true, and return that; fail with what was waited for."""
    end = time.monotonic() + timeout_s
    while not (value := true()):
        assert time.monotonic() < end, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.02)
    return value

"""A stranger's call with a deadline, for code that is not asynchronous."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Return what `call` returns, or raise what it raises, SystemExit included.

    Raises TimeoutError after `limit_s`: the call then goes on alone, in a daemon thread that holds
    up no exit.

    >>> within(5.0, lambda: 7)
    7
    """
    box: queue.SimpleQueue[tuple[T] | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            box.put((call(),))
        except BaseException as exc:  # noqa: BLE001  handed over to the caller, which judges it
            box.put(exc)

    threading.Thread(target=run, name="everstep-within", daemon=True).start()
    try:
        outcome = box.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"did not come back within {limit_s:g} s") from None
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome[0]

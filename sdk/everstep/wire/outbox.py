"""What must arrive, kept until the far end has said that it has."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Numbers messages from 1 and keeps each until it is acknowledged.

    Not bounded by age: an unacknowledged message is the only copy. When `limit` is reached the
    oldest is dropped and counted in `dropped`, so that memory stays bounded while nobody listens.

    >>> box = Outbox[str](limit=10)
    >>> box.put("a"), box.put("b")
    (1, 2)
    >>> box.ack(1)
    >>> box.pending()
    [(2, 'b')]
    """

    def __init__(self, *, limit: int = 10_000) -> None:
        self._kept: deque[tuple[int, T]] = deque()
        self._next = 1
        self._limit = limit
        self.dropped = 0

    def put(self, message: T) -> int:
        """Keep a message and return its number."""
        seq = self._next
        self._next += 1
        self._kept.append((seq, message))
        if len(self._kept) > self._limit:
            self._kept.popleft()
            self.dropped += 1
        return seq

    def ack(self, seq: int) -> None:
        """Forget everything up to and including `seq`."""
        while self._kept and self._kept[0][0] <= seq:
            self._kept.popleft()

    def pending(self) -> list[tuple[int, T]]:
        """Return what has not been acknowledged, oldest first."""
        return list(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

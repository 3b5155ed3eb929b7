"""The order of samples: a pure function of (seed, global sample index), whatever the world size.

The whole state of "where are we in the data" is one integer, the next global sample index, and
the list of windows that are skipped on purpose.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

Range = tuple[int, int]
"""Half-open: first index, one past the last."""

_ROUNDS = 4
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def take(cursor: int, count: int, skip: Sequence[Range]) -> tuple[list[Range], int]:
    """Return the next `count` sample indices from `cursor` on, and the cursor after them.

    >>> take(0, 4, [])
    ([(0, 4)], 4)
    >>> take(0, 4, [(2, 10)])
    ([(0, 2), (10, 12)], 12)
    """
    ranges: list[Range] = []
    for start, stop in sorted(skip):
        if count == 0 or stop <= cursor:
            continue
        if cursor < start:
            end = min(start, cursor + count)
            ranges.append((cursor, end))
            count -= end - cursor
            cursor = end
        if cursor >= start and count:
            cursor = stop
    if count:
        ranges.append((cursor, cursor + count))
        cursor += count
    return ranges, cursor


def share(ranges: Iterable[Range], part: int, parts: int) -> list[Range]:
    """Return the `part`-th of `parts` equal, contiguous shares of the indices in `ranges`.

    >>> share([(0, 2), (10, 14)], 1, 3)
    [(10, 12)]
    >>> share([(0, 3), (10, 13)], 0, 2), share([(0, 2), (10, 12)], 0, 1)
    ([(0, 3)], [(0, 2), (10, 12)])
    """
    ranges = list(ranges)
    each = sum(stop - start for start, stop in ranges) // parts
    first, last = part * each, (part + 1) * each
    out: list[Range] = []
    seen = 0
    for start, stop in ranges:
        low, high = max(first, seen), min(last, seen + stop - start)
        if low < high:
            out.append((start + low - seen, start + high - seen))
        seen += stop - start
    return out


def expand(ranges: Iterable[Range]) -> NDArray[np.int64]:
    """Return the indices in `ranges`, one after the other."""
    parts = [np.arange(start, stop, dtype=np.int64) for start, stop in ranges]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


class Shuffle:
    """A permutation of `range(size)` for every epoch, computed one index at a time.

    A Feistel network over a rectangle just larger than `size`, walked until it lands inside: no
    table, so a data set of any size costs nothing to shuffle, and any index is known on its own.
    """

    def __init__(self, size: int, seed: int) -> None:
        if size < 1:
            raise ValueError("there is nothing to shuffle")
        self.size = size
        self._seed = seed
        rows = max(1, math.isqrt(size))
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-size // rows))
        self._keys: dict[int, list[np.uint64]] = {}

    def __call__(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which of the `size` items each global sample index is, in any epoch."""
        epoch, position = np.divmod(index, self.size)
        out = np.empty_like(index)
        for e in sorted(set(epoch.tolist())):
            chosen = epoch == e
            out[chosen] = self._permute(position[chosen], e)
        return out

    def _permute(self, position: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        keys = self._keys.get(epoch)
        if keys is None:
            keys = self._keys[epoch] = _keys(self._seed, epoch)
        value = self._network(position.astype(np.uint64), keys)
        while (outside := value >= self.size).any():
            value[outside] = self._network(value[outside], keys)
        return value.astype(np.int64)

    def _network(self, value: NDArray[np.uint64], keys: list[np.uint64]) -> NDArray[np.uint64]:
        row, column = value // self._columns, value % self._columns
        for one, other in zip(keys[::2], keys[1::2], strict=True):
            row = (row + _mix(column ^ one) % self._rows) % self._rows
            column = (column + _mix(row ^ other) % self._columns) % self._columns
        return row * self._columns + column


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finalizer of splitmix64 (Steele, Lea, Flood 2014); multiplication wraps on purpose.
    x = (x ^ (x >> _S30)) * _MIX_A
    x = (x ^ (x >> _S27)) * _MIX_B
    return x ^ (x >> _S31)


def _keys(seed: int, epoch: int) -> list[np.uint64]:
    state = (seed * 0x2545F4914F6CDD1D + epoch * 0xD1342543DE82EF95 + 1) & _MASK64
    start = np.array([(state + i * _GOLDEN) & _MASK64 for i in range(_ROUNDS)], np.uint64)
    return list(_mix(start))

"""Random states of one rank, packed for a snapshot, and seeds for a rank that has none."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import torch

_MASK64 = (1 << 64) - 1


def seed(seed_: int, *, step: int, rank: int) -> None:
    """Start all generators of this rank from (seed, step, rank)."""
    value = derived(seed_, step=step, rank=rank)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.manual_seed(value & (_MASK64 >> 1))


def follow(seed_: int, *, step: int, rank: int) -> None:
    """Do what `seed` does, for every step: only generators that are in use, in microseconds."""
    value = derived(seed_, step=step, rank=rank)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value & (_MASK64 >> 1))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's gap
        torch.cuda.manual_seed(value & (_MASK64 >> 1))


def derived(seed_: int, *, step: int, rank: int) -> int:
    """Return 64 bits that differ for every (seed, step, rank).

    >>> derived(1, step=0, rank=0) != derived(0, step=1, rank=0) != derived(0, step=0, rank=1)
    True
    """
    value = seed_ & _MASK64
    for part in (step, rank):
        # One round of splitmix64 (Steele, Lea, Flood 2014) for each part that is folded in.
        value = (value + (part + 1) * 0x9E3779B97F4A7C15) & _MASK64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
        value ^= value >> 31
    return value


def pack() -> bytes:
    """Return the state of Python's, NumPy's and torch's global generators as bytes."""
    name, keys, *numpy_rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tobytes(), *numpy_rest],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": [s.numpy().tobytes() for s in _cuda_states()],
    }
    return msgspec.msgpack.encode(states)


def unpack(packed: bytes) -> None:
    """Put the generators back where `pack` found them."""
    states = msgspec.msgpack.decode(packed)
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
    torch.set_rng_state(_bytes(states["torch"]))
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(states["cuda"][0]))


def _cuda_states() -> list[torch.Tensor]:
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's gap
    return [torch.cuda.get_rng_state()] if started else []


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

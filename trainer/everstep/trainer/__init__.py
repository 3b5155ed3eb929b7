"""The training loop, its snapshots, and `Session` for people with a loop of their own."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.trainer.config import ModelConfig, SessionConfig, TrainerConfig
    from everstep.trainer.data import prepare_bytes
    from everstep.trainer.running import run
    from everstep.trainer.session import Session
    from everstep.trainer.train import train

__all__ = [
    "ModelConfig",
    "Session",
    "SessionConfig",
    "TrainerConfig",
    "prepare_bytes",
    "run",
    "train",
]

_HOMES = {
    "ModelConfig": "config",
    "SessionConfig": "config",
    "TrainerConfig": "config",
    "Session": "session",
    "prepare_bytes": "data",
    "run": "running",
    "train": "train",
}


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds; who only packs data or reads a ledger does not pay for it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""A step as hooks see it, for tests that need no training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from everstep.sdk.hooks import Decision


@dataclass
class FakeStep:
    number: int = 1
    loss: float = 1.0
    grad_norm: float = math.nan
    last: bool = False
    tokens: int = 100
    lr: float = 0.1
    step_s: float = 0.5
    data_s: float = 0.1
    forward_s: float = 0.1
    backward_s: float = 0.2
    update_s: float = 0.1
    snapshot_s: float = 0.0
    samples: Sequence[tuple[int, int]] = ((0, 12),)
    parameters: Sequence[torch.Tensor] = ()
    decision: Decision = Decision.PROCEED


@dataclass
class FakeRun:
    rank: int = 0
    world_size: int = 1
    generation: int = 1
    run_dir: Path = field(default_factory=Path)
    steps: int = 100
    done: int = 0
    warmup_steps: int = 0
    mtbf_s: float | None = None

"""AdamW and its learning rate, a pure function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from everstep.trainer.config import TrainerConfig


def adamw(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """Return AdamW that decays matrices and leaves gains and biases alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # Fused takes a third of the time of the other two implementations, on CPU as well.
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def learning_rate(step: int, config: TrainerConfig) -> float:
    """Return the rate of one step (from 1): linear warm-up, then half a cosine down to the floor.

    >>> from everstep.trainer.config import TrainerConfig
    >>> c = TrainerConfig(run_dir="", data="", steps=30, lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    >>> [round(learning_rate(s, c), 3) for s in (1, 10, 20, 30)]
    [0.1, 1.0, 0.55, 0.1]
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    falling = max(1, config.steps - config.warmup_steps)
    share = min(1.0, (step - config.warmup_steps) / falling)
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share)))


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> float:
    """Use `lr` from now on; returns it."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr

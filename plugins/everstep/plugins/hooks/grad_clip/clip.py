"""Global norm clipping, over all parameters at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec
import torch

from everstep.plugins.hooks.grad_clip.norm import mine, total_norm

if TYPE_CHECKING:
    from everstep.sdk.hooks import Step


class GradClipConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[hooks.grad_clip]`."""

    max_norm: float = 1.0

    def __post_init__(self) -> None:
        """Raise ValueError for a norm that would stop all training."""
        if self.max_norm <= 0:
            raise ValueError(f"max_norm must be above 0, not {self.max_norm}")


class GradClip:
    """Scales all gradients down together when their norm is above `max_norm`.

    Every rank finds the same norm: gradients are the same on all by then, or shards of the same.
    """

    Config: ClassVar = GradClipConfig
    touches_gradients: ClassVar = True

    def __init__(self, config: GradClipConfig) -> None:
        self._max_norm = config.max_norm

    def before_update(self, step: Step) -> None:
        """Clip, and put the norm from before clipping where other hooks and the page see it."""
        gradients = [p.grad for p in step.parameters if p.grad is not None]
        if not gradients:
            return
        step.grad_norm = total_norm(gradients)
        if step.grad_norm > self._max_norm:
            factor = self._max_norm / (step.grad_norm + 1e-6)
            torch._foreach_mul_([mine(gradient) for gradient in gradients], factor)

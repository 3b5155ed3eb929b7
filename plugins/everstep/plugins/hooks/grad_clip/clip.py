"""Global norm clipping in fp32, over all parameters at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    Gradients are the same on all ranks by then, so every rank finds the same norm.
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
        norm = total_norm(gradients)
        step.grad_norm = norm.item()
        if step.grad_norm > self._max_norm:
            factor = self._max_norm / (step.grad_norm + 1e-6)
            torch._foreach_mul_(gradients, factor)


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients as one fp32 number, whatever their own precision."""
    # One fused pass instead of a small kernel for each parameter, as torch's own clipping does.
    norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float32)  # noqa: SLF001  see above
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([n.to(norms[0].device) for n in norms])
    )
    return total

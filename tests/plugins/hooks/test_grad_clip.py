from __future__ import annotations

import math

import pytest
import torch
from tests.plugins.hooks.steps import FakeStep

from everstep.plugins.hooks.grad_clip import GradClip, GradClipConfig


def parameters(*gradients: list[float], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    made = []
    for gradient in gradients:
        made.append(torch.zeros(len(gradient), dtype=dtype, requires_grad=True))
        made[-1].grad = torch.tensor(gradient, dtype=dtype)
    return made


def clip(step: FakeStep, max_norm: float = 1.0) -> None:
    GradClip(GradClipConfig(max_norm=max_norm)).before_update(step)


def test_gradients_above_the_norm_are_scaled_down_together() -> None:
    step = FakeStep(parameters=parameters([3.0, 0.0], [0.0, 4.0]))
    clip(step)
    assert step.grad_norm == 5.0, "the norm from before clipping"
    after = torch.cat([p.grad for p in step.parameters if p.grad is not None])
    assert after.norm().item() == pytest.approx(1.0, abs=1e-5)
    assert after[0].item() / after[3].item() == pytest.approx(3 / 4)


def test_gradients_within_the_norm_keep_every_bit() -> None:
    step = FakeStep(parameters=parameters([0.1, 0.2], [0.3]))
    before = [p.grad.clone() for p in step.parameters if p.grad is not None]
    clip(step)
    for p, gradient in zip(step.parameters, before, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, gradient)


def test_it_agrees_with_torch() -> None:
    torch.manual_seed(0)
    ours = parameters(*(torch.randn(n).tolist() for n in (5, 50, 500)))
    theirs = parameters(*(p.grad.tolist() for p in ours if p.grad is not None))
    step = FakeStep(parameters=ours)
    clip(step, 2.0)
    norm = torch.nn.utils.clip_grad_norm_(theirs, 2.0)
    assert step.grad_norm == pytest.approx(norm.item())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_small_precision_does_not_lose_the_norm() -> None:
    step = FakeStep(parameters=parameters([1.0] * 100_000, dtype=torch.bfloat16))
    clip(step, 1e9)
    assert step.grad_norm == pytest.approx(math.sqrt(100_000), rel=1e-4)


def test_parameters_without_gradients_are_no_trouble() -> None:
    step = FakeStep(parameters=[torch.zeros(3, requires_grad=True)])
    clip(step)
    assert math.isnan(step.grad_norm)


def test_a_norm_that_is_not_a_number_is_told_not_hidden() -> None:
    step = FakeStep(parameters=parameters([1.0, math.inf]))
    clip(step)
    assert math.isinf(step.grad_norm)

"""Copying out of an accelerator: while it computes, at the speed of the bus, and never torn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.trainer.snapshot_bench import DEADLINE_S, Bench, alone, bench, same

from everstep.trainer.snapshot.capture import pin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

_MIB = 2**20


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Bench]:
    group = alone()
    with bench(tmp_path / "snapshots", group) as one:
        yield one
    dist.destroy_process_group()


def training(width: int = 4096) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    objects = {"model": model, "optimizer": optimizer}
    train(objects)
    return objects


def train(objects: dict[str, Any]) -> None:
    model = objects["model"]
    model(torch.rand(64, model[0].in_features, device="cuda")).square().mean().backward()
    objects["optimizer"].step()
    objects["optimizer"].zero_grad()


def weights(objects: dict[str, Any]) -> list[torch.Tensor]:
    return [p.detach().cpu().clone() for p in objects["model"].parameters()]


def pinned_copy_s(size_bytes: int) -> float:
    source = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def test_the_step_after_the_call_is_not_in_the_snapshot(made: Bench) -> None:
    objects = training()
    expected = weights(objects)
    made.take(objects, 1)
    made.engine.wait_copied()  # makes the device wait, not the host
    for _ in range(3):
        train(objects)
    assert made.engine.wait(DEADLINE_S)
    assert not made.findings
    made.load(objects, "s000001-g1", tiers="memory")
    assert all(same(a, b) for a, b in zip(weights(objects), expected, strict=True))


def test_the_slots_are_pinned_and_the_loop_is_hardly_held_up(made: Bench) -> None:
    objects = training()
    made.save(objects, 1)
    assert all(pin(slot.bytes) for slot in made.engine.slots.slots)
    size = sum(p.nbytes for p in objects["model"].parameters()) * 3
    copy_s = pinned_copy_s(size)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    made.take(objects, 2)
    made.engine.wait_copied()
    blocked_s = time.perf_counter() - begin
    held = len(made.held)
    torch.cuda.synchronize()
    captured_s = time.perf_counter() - begin
    assert made.engine.wait(DEADLINE_S)
    assert len(made.held) >= held
    print(
        f"{size / _MIB:.0f} MiB: copy {copy_s:.3f} s, captured {captured_s:.3f} s, "
        f"blocked {blocked_s:.3f} s"
    )
    assert blocked_s < max(0.05, copy_s)
    assert captured_s < 5 * copy_s + 0.5

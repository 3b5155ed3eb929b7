"""What hooks and the progress page cost a step: `python tests/bench/hooks.py [--quick]`.

Dispatch is timed through all moments of a step, as the loop fires them, on one rank and without
the tensor work of clipping and the all-reduce, which any loop has. It is processor time of this
thread: nothing in there waits, and what else runs on the machine is not the hooks' doing. The last
line on stdout is one JSON object.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench import form

from everstep.plugins.hooks.grad_clip import GradClip, GradClipConfig
from everstep.plugins.hooks.loss_spike import LossSpike, LossSpikeConfig
from everstep.plugins.hooks.progress import Progress, ProgressConfig
from everstep.plugins.hooks.snapshot import Snapshot, SnapshotConfig
from everstep.sdk import Finding
from everstep.sdk.hooks import Decision
from everstep.trainer.agree import Agreement
from everstep.trainer.dispatch import Dispatch
from everstep.trainer.place import Seat
from everstep.trainer.presence import Presence
from everstep.trainer.snapshot.wishes import Wishes
from everstep.trainer.step import Run, Step

TARGETS = {"hooks_us_per_step": 20.0, "default_hooks_us_per_step": 60.0}
STEPS = 2000
WARM_UP_STEPS = 300
"""The spike detector judges nothing before it has seen 64 good losses."""


class Known(Agreement):
    """The losses of all ranks, without the ranks."""

    def __init__(self) -> None:
        super().__init__(hooks=0, device=torch.device("cpu"))
        self.number = 0

    def loss(self) -> tuple[float, int]:
        """Return a loss on its way down, with some noise."""
        self.number += 1
        return 3 + math.exp(-self.number / 1000) + 0.01 * math.sin(self.number * 7.3), 4096


def one_step(dispatch: Dispatch, step: Step) -> Callable[[], None]:
    """Return what a training step does for its hooks, in order."""

    def run() -> None:
        step.begin(step.number + 1, last=False, samples=((0, 12),))
        dispatch.fire("batch", step)
        dispatch.fire("forward", step)
        dispatch.fire("backward", step)
        # What clipping finds out with tensor work, which is left apart.
        step.grad_norm = 1 + 0.2 * math.sin(step.number)
        if dispatch.fire("before_update", step) is not Decision.PROCEED:
            raise AssertionError("a healthy loss was voted down")
        dispatch.failures()
        dispatch.fire("after_update", step)

    return run


def microseconds(call: Callable[[], None], *, rounds: int) -> float:
    """Return the median over rounds of the mean time of a call."""
    for _ in range(WARM_UP_STEPS):
        call()
    means = []
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(STEPS):
            call()
        means.append((time.thread_time() - begin) / STEPS * 1e6)
    return statistics.median(means)


def measure(*, rounds: int) -> dict[str, float]:
    """Return both figures."""
    findings: list[Finding] = []
    presence = Presence(Seat())
    run = Run(0, 1, 1, Path(tempfile.gettempdir()), steps=10**9)
    progress = Progress(ProgressConfig(log_every_steps=0), presence)
    plugins: dict[str, object] = {
        "grad_clip": GradClip(GradClipConfig()),
        "loss_spike": LossSpike(LossSpikeConfig(), findings.append, time.time),
        "progress": progress,
        "snapshot": Snapshot(
            SnapshotConfig(every_steps=10**9), Wishes(), findings.append, time.time
        ),
    }
    figures = {}
    for name, chosen in (
        ("hooks_us_per_step", {"progress": progress}),
        ("default_hooks_us_per_step", plugins),
    ):
        dispatch = Dispatch(chosen, report=findings.append)
        dispatch.fire("run_start", run)
        step = Step(Known(), rank=0, world_size=1)
        figures[name] = microseconds(one_step(dispatch, step), rounds=rounds)
    presence.close(flush_s=0.0)
    if findings:
        raise AssertionError(f"the hooks complained: {findings[0].summary}")
    return figures


def main() -> None:
    """Measure and print."""
    rounds = 5 if form.options(__doc__).parse_args().quick else 25
    form.say(f"{rounds} rounds of {STEPS} steps")
    report = form.Form("hooks", TARGETS, runs=rounds)
    for name, value in measure(rounds=rounds).items():
        report.put(name, value)
    report.print()


if __name__ == "__main__":
    main()

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.plugins.hooks.steps import FakeRun, FakeStep

from everstep.plugins.hooks.loss_spike import Detector, Event, LossSpike, LossSpikeConfig
from everstep.sdk import Finding
from everstep.sdk.hooks import Decision

ROOT = Path(__file__).parents[3]


def curve(steps: int, *, seed: int = 1, noise: float = 0.02) -> list[float]:
    """A loss on its way down from 9 to about 3, with noise."""
    rng = random.Random(seed)
    return [3 + 6 * math.exp(-s / 60) + rng.gauss(0, noise) for s in range(steps)]


def events(losses: Iterable[float], norms: Iterable[float] = (), **config: float) -> list[Event]:
    detector = Detector(LossSpikeConfig(**config))  # type: ignore[arg-type]  # numbers by name
    norm = iter(norms)
    seen = (detector.see(n, x, next(norm, math.nan)) for n, x in enumerate(losses, 1))
    return [event for event in seen if event]


def test_a_healthy_curve_raises_nothing() -> None:
    for seed in range(5):
        assert events(curve(2000, seed=seed)) == []


def test_one_odd_batch_is_level_one() -> None:
    losses = curve(400)
    losses[300] += 2.0
    assert [(e.kind, e.level) for e in events(losses)] == [("outlier", 1)]


def test_a_jump_of_loss_and_gradient_norm_is_a_spike_at_once() -> None:
    losses, norms = curve(400), [1 + 0.1 * math.sin(n) for n in range(400)]
    losses[300] += 2.0
    norms[298] = 50.0
    assert [(e.kind, e.level) for e in events(losses, norms)] == [("spike", 2)]


def test_several_odd_ones_close_together_are_a_spike() -> None:
    losses = curve(400)
    for n in (300, 302, 303):
        losses[n] += 1.0
    assert [e.level for e in events(losses)] == [1, 1, 2]


def test_a_level_that_stays_is_learned() -> None:
    losses = curve(400) + [x + 2 for x in curve(400)[200:]] + curve(400)[200:]
    found = events(losses)
    assert [e.kind for e in found].count("shift") == 1
    assert found[-1].kind == "shift", "the new level is usual, and so is the way back down"


def test_a_nan_is_told_and_never_learned() -> None:
    losses = curve(400)
    with_nan = list(losses)
    for n in (100, 200, 201):
        with_nan.insert(n, math.nan)
    with_nan[350] += 2.0
    found = events(with_nan)
    assert [e.kind for e in found] == ["non_finite"] * 3 + ["outlier"]
    assert math.isfinite(found[-1].deviations)


def test_a_constant_loss_has_a_floor_under_its_spread() -> None:
    assert events([2.0] * 200 + [2.1] + [2.0] * 10) == []
    assert [e.kind for e in events([2.0] * 200 + [2.5])] == ["outlier"]


def test_warm_up_is_left_alone() -> None:
    losses = curve(400)
    losses[150] += 3.0
    assert len(events(losses)) == 1
    detector = Detector(LossSpikeConfig(), warmup_steps=160)
    assert not any(detector.see(n, x) for n, x in enumerate(losses, 1))


def test_data_that_jumps_all_the_time_is_healthy() -> None:
    rng = random.Random(4)
    losses = [x + (2.5 if rng.random() < 0.08 else 0.0) for x in curve(3000, noise=0.1)]
    assert [e for e in events(losses) if e.level == 2] == []


def test_what_it_knows_survives_a_restart_exactly() -> None:
    losses = curve(600)
    losses[400] += 2.0
    whole = Detector(LossSpikeConfig())
    first = Detector(LossSpikeConfig())
    for n in range(300):
        whole.see(n, losses[n], 1.0)
        first.see(n, losses[n], 1.0)
    resumed = Detector(LossSpikeConfig())
    resumed.restore(first.known())
    for n in range(300, 600):
        assert whole.see(n, losses[n], 1.0) == resumed.see(n, losses[n], 1.0)
    assert whole.known() == resumed.known()


# ------------------------------------------------------------------------------------ the hook


def hook(policy: str, findings: list[Finding]) -> LossSpike:
    config = LossSpikeConfig(policy=policy, max_skips=3)  # type: ignore[arg-type]  # one of two
    made = LossSpike(config, findings.append, lambda: 7.0)
    made.run_start(FakeRun())
    return made


def votes(policy: str, spike: int) -> tuple[list[int], list[Finding]]:
    """Return the steps whose update was voted down, and what was told."""
    findings: list[Finding] = []
    watch = hook(policy, findings)
    losses = curve(400)
    for n in range(300, 300 + spike):
        losses[n] += 2.0
    out = []
    for n, loss in enumerate(losses):
        if watch.before_update(FakeStep(number=n, loss=loss)) is Decision.SKIP_UPDATE:
            out.append(n)
    return out, findings


def test_it_logs_by_default_and_tells_each_episode_once() -> None:
    skipped, findings = votes("log", spike=6)
    assert skipped == []
    assert [(f.name, f.severity) for f in findings] == [
        ("loss.outlier", "info"),
        ("loss.spike", "error"),
    ]
    assert "samples 0-12" in findings[0].summary


def test_skipping_ends_when_it_does_not_help() -> None:
    skipped, findings = votes("skip_update", spike=10)
    assert skipped == [302, 303, 304]
    assert "The update is skipped" in findings[-1].summary


def test_a_state_from_elsewhere_is_ignored() -> None:
    watch = hook("log", [])
    watch.restore({"losses": "none"})
    state = json.loads(json.dumps(watch.state()))
    watch.restore(state)
    assert watch.state() == state


# ------------------------------------------------------------------- real curves, if at hand

# Labelled curves of public runs that some development machines keep beside the checkout.
CURVES = next(ROOT.parent.glob("*/cases/loss_curves"), None)
needs_curves = pytest.mark.skipif(CURVES is None, reason="no loss_curves beside the checkout")


def real(pattern: str) -> list[Path]:
    return sorted(CURVES.glob(pattern)) if CURVES else []


def real_events(path: Path) -> list[Event]:
    detector = Detector(LossSpikeConfig())
    seen = []
    with path.open() as file:
        for row in csv.DictReader(file):
            loss, norm = row["loss"], row.get("grad_norm")
            step, value = int(float(row["step"])), float(loss) if loss else math.nan
            seen.append(detector.see(step, value, float(norm) if norm else math.nan))
    return [event for event in seen if event]


CLEAN = ("*.csv", "algoperf/clean_*.csv", "algoperf/nonfinite_*.csv", "algoperf/*imagenet_vit*.csv")


@needs_curves
@pytest.mark.parametrize("path", [p for c in CLEAN for p in real(c)], ids=lambda p: p.stem)
def test_no_action_on_real_curves_of_healthy_runs(path: Path) -> None:
    assert [e for e in real_events(path) if e.level == 2 and e.kind != "non_finite"] == []


@needs_curves
def test_most_real_spikes_are_seen() -> None:
    spiky = [p for p in real("algoperf/spike_*.csv") if "imagenet_vit" not in p.name]
    spiky += real("algoperf/diverge_*deepspeech*.csv")
    levels = [max((e.level for e in real_events(p)), default=0) for p in spiky]
    assert len(levels) == 6
    assert sum(level >= 1 for level in levels) >= 5
    assert sum(level == 2 for level in levels) >= 4

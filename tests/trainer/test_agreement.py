"""What one rank sees or suffers decides for all of them alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.trainer.ranks import StartRanks

LOOP = """
import json, math, os, sys
from pathlib import Path
import torch
from everstep.sdk.hooks import Decision
from everstep.trainer import Session, SessionConfig
from everstep.trainer import admission

out = Path(sys.argv[1])
rank = int(os.environ["RANK"])
lines = []

def run(hooks, steps=8, spoil=None, settings=None):
    # The hooks come in as the door would bring them.
    import everstep.trainer.session as module
    module.admit_hooks = lambda file, offers: {
        name: make(offers) for name, make in hooks.items()
    }
    torch.manual_seed(1)
    applied = []
    with Session(SessionConfig(run_dir=str(out / "run"), seed=3, **(settings or {}))) as session:
        session._presence.report = lambda finding: lines.append(finding.summary)
        session._dispatch._report = session._presence.report
        model = session.wrap(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for step in session.steps(steps):
                x = torch.full((2, 4), float(rank + step.number % 3) / 3)
                loss = (model(x) ** 2).mean()
                if spoil:
                    loss = spoil(step.number, loss)
                loss.backward()
                applied.append(session.step(optimizer, loss=loss))
        finally:
            weights = [p.tolist() for p in model.parameters()]
            result = {"applied": applied, "weights": weights, "findings": lines,
                      "on": [h.name for h in session._dispatch.hooks if h.on]}
            (out / f"{rank}.json").write_text(json.dumps(result))
"""


def results(ranks: StartRanks, tmp_path: Path, body: str, world: int = 3) -> list[dict]:  # type: ignore[type-arg]  # JSON
    script = tmp_path / "loop.py"
    script.write_text(LOOP + body)
    started = ranks(world, script, tmp_path)
    codes = started.wait()
    assert codes in ([0] * world, [1] * world), started.log()
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]


def test_a_nan_on_one_rank_keeps_the_update_from_all_of_them(
    start_ranks: StartRanks, tmp_path: Path
) -> None:
    found = results(
        start_ranks,
        tmp_path,
        """
run({}, spoil=lambda step, loss: loss * math.nan if (rank, step) == (1, 3) else loss)
""",
    )
    assert [r["applied"] for r in found] == [[True, True, False, True, True, True, True, True]] * 3
    assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"]


def test_a_vote_of_one_rank_is_the_vote_of_all(start_ranks: StartRanks, tmp_path: Path) -> None:
    found = results(
        start_ranks,
        tmp_path,
        """
class Picky:
    def forward(self, step):
        return Decision.SKIP_UPDATE if (rank, step.number) == (2, 5) else None
run({"picky": lambda offers: Picky()})
""",
    )
    assert [r["applied"].index(False) for r in found] == [4, 4, 4]
    assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"]


def test_a_hook_that_raises_on_one_rank_is_off_on_all_after_three_times(
    start_ranks: StartRanks, tmp_path: Path
) -> None:
    found = results(
        start_ranks,
        tmp_path,
        """
class Broken:
    def before_update(self, step):
        if rank == 1:
            raise KeyError("no such thing")
        return Decision.SKIP_UPDATE if step.number == 8 else None
run({"broken": lambda offers: Broken()})
""",
    )
    assert [r["applied"] for r in found] == [[True] * 8] * 3, "off before its vote at step 8"
    assert [r["on"] for r in found] == [[]] * 3
    assert "KeyError: 'no such thing'" in found[1]["findings"][0]
    assert "off for this run" in found[0]["findings"][-1]


def test_half_changed_gradients_are_applied_nowhere(
    start_ranks: StartRanks, tmp_path: Path
) -> None:
    found = results(
        start_ranks,
        tmp_path,
        """
class Clip:
    touches_gradients = True
    def before_update(self, step):
        for p in step.parameters:
            p.grad.mul_(0.5)
            if (rank, step.number) == (1, 2):
                raise MemoryError("in the middle")
run({"clip": lambda offers: Clip()})
""",
    )
    assert [r["applied"] for r in found] == [[True, False, *[True] * 6]] * 3
    assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"]


def test_a_hook_that_one_rank_lacks_is_off_on_all(start_ranks: StartRanks, tmp_path: Path) -> None:
    found = results(
        start_ranks,
        tmp_path,
        """
class Watch:
    def after_update(self, step): ...
run({"watch": lambda offers: Watch()} if rank else {})
""",
    )
    assert [r["on"] for r in found] == [[]] * 3


def test_a_spike_of_one_rank_is_skipped_by_all(start_ranks: StartRanks, tmp_path: Path) -> None:
    found = results(
        start_ranks,
        tmp_path,
        """
from everstep.plugins.hooks.loss_spike import LossSpike, LossSpikeConfig
config = LossSpikeConfig(policy="skip_update", min_good=8, outliers=1)
run(
    {"loss_spike": lambda offers: LossSpike(config, offers["report"], offers["clock"])},
    steps=24,
    spoil=lambda step, loss: loss + (40 if (rank, step) == (2, 21) else 1),
)
""",
    )
    assert [[n for n, a in enumerate(r["applied"], 1) if not a] for r in found] == [[21]] * 3
    assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"]


@pytest.mark.parametrize("how", ["stop", "skip"])
def test_a_run_that_goes_nowhere_ends_on_all_ranks_alike(
    how: str, start_ranks: StartRanks, tmp_path: Path
) -> None:
    found = results(
        start_ranks,
        tmp_path,
        f"""
class Hook:
    def batch(self, step): ...
    def before_update(self, step):
        if rank == 2 and {how!r} == "stop" and step.number == 4:
            return Decision.STOP
        return Decision.SKIP_UPDATE if rank == 2 and {how!r} == "skip" else None
run({{"hook": lambda offers: Hook()}}, settings={{"stop_after_skips": 4}})
""",
    )
    assert [len(r["applied"]) for r in found] == [3, 3, 3]

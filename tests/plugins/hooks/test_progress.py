from __future__ import annotations

import logging

import pytest
from tests.plugins.hooks.steps import FakeRun, FakeStep

from everstep.plugins.hooks.progress import Progress, ProgressConfig
from everstep.sdk.hooks import Step


class FakePage:
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def finished(self, step: Step) -> None:
        self.numbers.append(step.number)


def test_every_step_is_put_down_and_rank_0_says_some(caplog: pytest.LogCaptureFixture) -> None:
    page = FakePage()
    hook = Progress(ProgressConfig(log_every_steps=4), page)
    hook.run_start(FakeRun())
    with caplog.at_level(logging.INFO):
        for number in range(1, 10):
            hook.after_update(FakeStep(number=number, last=number == 9))
    assert page.numbers == list(range(1, 10))
    assert [r.getMessage().split()[1] for r in caplog.records] == ["4", "8", "9"]
    assert "200 tokens/s" in caplog.records[0].getMessage()


@pytest.mark.parametrize(("rank", "every"), [(1, 1), (0, 0)])
def test_other_ranks_and_zero_are_silent(
    rank: int, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    hook = Progress(ProgressConfig(log_every_steps=every), FakePage())
    hook.run_start(FakeRun(rank=rank))
    with caplog.at_level(logging.INFO):
        hook.after_update(FakeStep())
    assert not caplog.records

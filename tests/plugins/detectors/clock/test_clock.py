"""A clock that jumps, is off, or that nothing keeps right."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.plugins.detectors.clock import ClockDetector
from everstep.sdk import Finding, Reading
from everstep.sdk.testing import check_contract


def clock(
    *, step: float | None = 0.0, offset: float | None = 0.0, synchronized: float | None = 1.0
) -> list[Reading]:
    values = {"step": step, "offset": offset, "synchronized": synchronized, "max_error": 0.5}
    return [Reading(name=f"everstep.host.clock.{n}", value=v) for n, v in values.items()]


class Bench:
    def __init__(self, **config: Any) -> None:
        self.now_s = 1000.0
        self._detector = ClockDetector(ClockDetector.Config(**config))

    def told(self, readings: list[Reading], *, after_s: float = 1.0) -> list[str]:
        return [f.name for f in self.findings(readings, after_s=after_s)]

    def findings(self, readings: list[Reading], *, after_s: float = 1.0) -> list[Finding]:
        self.now_s += after_s
        return list(self._detector.detect(readings, self.now_s))


def test_a_sound_clock_is_not_mentioned() -> None:
    bench = Bench()
    assert [bench.told(clock(), after_s=100) for _ in range(10)] == [[]] * 10


@pytest.mark.parametrize(
    ("step_s", "words"), [(2.5, "set forward by 2.500 s"), (-0.1, "set back by 0.100 s")]
)
def test_a_step_is_told_for_a_while_with_its_size_and_its_time(step_s: float, words: str) -> None:
    bench = Bench()
    (first,) = bench.findings(clock(step=step_s))
    assert first.name == "clock.stepped"
    assert words in first.summary
    assert bench.findings(clock(), after_s=59) == [first]
    assert bench.findings(clock(), after_s=2) == []


def test_a_slew_is_no_step() -> None:
    assert Bench().told(clock(step=0.09)) == []
    assert Bench(step_s=0.05).told(clock(step=0.09)) == ["clock.stepped"]


@pytest.mark.parametrize("offset_s", [0.08, -0.08])
def test_an_offset_is_told_once_it_has_lasted(offset_s: float) -> None:
    bench = Bench()
    assert bench.told(clock(offset=offset_s)) == []
    assert bench.told(clock(offset=offset_s), after_s=59) == []
    (finding,) = bench.findings(clock(offset=offset_s), after_s=1)
    assert finding.name == "clock.offset"
    assert f"{offset_s * 1000:+.0f} ms" in finding.summary
    assert finding.at_s == 1001.0  # when it began, not when it was told
    assert bench.told(clock(offset=0.001)) == []


def test_an_offset_that_comes_and_goes_is_not_told() -> None:
    bench = Bench()
    for _ in range(5):
        assert bench.told(clock(offset=0.2), after_s=40) == []
        assert bench.told(clock(offset=0.0), after_s=40) == []


def test_a_clock_without_a_source_is_told_after_a_while() -> None:
    bench = Bench()
    assert bench.told(clock(synchronized=0)) == []
    (finding,) = bench.findings(clock(synchronized=0), after_s=300)
    assert (finding.name, finding.severity) == ("clock.unsynchronized", "info")
    assert "up to 0.5 s" in finding.summary
    assert bench.told(clock(synchronized=1)) == []


def test_where_the_kernel_may_not_be_asked_nothing_is_claimed() -> None:
    bench = Bench()
    unknown = clock(step=None, offset=None, synchronized=None)
    assert [bench.told(unknown, after_s=400) for _ in range(3)] == [[], [], []]
    assert bench.told([], after_s=400) == []


def test_the_contract_is_kept() -> None:
    check_contract(ClockDetector, readings=clock(step=3.0, offset=1.0, synchronized=0.0))

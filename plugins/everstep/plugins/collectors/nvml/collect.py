"""Opens the driver, asks every GPU once a pass, and opens it anew while something is amiss."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from everstep.plugins.collectors.nvml import parse
from everstep.plugins.collectors.nvml.driver import Driver, DriverError
from everstep.plugins.collectors.nvml.roll import Watched, called
from everstep.sdk import Episodes, Finding, Reading, Seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from everstep.plugins.collectors.nvml.parse import Error


class NvmlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often the driver is asked. `sample.toml` says it in the operator's words."""

    interval_s: Seconds = 1.0
    timeout_s: Seconds = 10.0
    retry_s: Seconds = 60.0


class NvmlCollector:
    """A driver that is absent, comes later, breaks or loses a GPU is an ordinary state here."""

    Config = NvmlConfig

    def __init__(
        self,
        config: NvmlConfig,
        clock: Callable[[], float],
        mono_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._mono_s = mono_s
        self._clock = clock
        self._driver: Driver | None = None
        self._closed: Error | None = None
        self._called = False
        self._open_at_s = float("-inf")
        self._roll: dict[str, Watched] = {}
        self._episodes = Episodes()

    def supported(self) -> str | None:
        """Return why there is nothing to look at. A driver that is there but broken is not that."""
        self._open_when_due()
        if self._closed and self._closed.code in parse.ABSENT:
            return f"no NVIDIA driver here: {self._closed.text}"
        if self._driver and not self._driver.count and not self._roll:
            return "the NVIDIA driver has no GPU"
        return None

    def collect(self) -> Iterable[Reading | Finding]:
        """Return the readings of every GPU, and what began or ended since the pass before."""
        self._open_when_due()
        self._call_the_roll()
        now_s = self._clock()
        out: list[Reading | Finding] = []
        if self._driver:
            for handle in self._driver.handles:
                out += self._roll[handle.gpu.uuid].hear(self._driver.look(handle))
            for watched in self._roll.values():
                out += watched.summary(now_s)
        # Without the driver, what was wrong with a GPU is not better for being out of sight.
        wrong = [finding for watched in self._roll.values() for finding in watched.findings(now_s)]
        if self._closed and (self._roll or self._closed.code not in parse.ABSENT):
            wrong.append(parse.unusable(self._closed, now_s))
        return [*out, *self._episodes.update({(f.name, f.component): f for f in wrong}, now_s)]

    def _open_when_due(self) -> None:
        well = self._driver and self._driver.count
        amiss = not well or any(watched.trouble for watched in self._roll.values())
        if not amiss or self._mono_s() < self._open_at_s:
            return
        self._open_at_s = self._mono_s() + self._config.retry_s
        if self._driver:
            self._driver.close()
        self._driver, self._closed = None, None
        self._called = False
        try:
            self._driver = Driver()
        except DriverError as exc:
            self._closed = exc.error

    def _call_the_roll(self) -> None:
        if self._driver and not self._called:
            self._called = True
            self._driver.read_list()
            here = [handle.gpu for handle in self._driver.handles]
            self._roll = called(self._roll, here, self._driver.unopened)

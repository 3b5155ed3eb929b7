"""Asks every GPU once a pass, and remembers those that are gone."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from everstep.plugins.collectors.nvml import parse
from everstep.plugins.collectors.nvml.driver import Driver, DriverError
from everstep.plugins.collectors.nvml.parse import Error, Gpu
from everstep.sdk import Episodes, Finding, Reading, Seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

_UNREADABLE_PASSES = 3


class NvmlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often the driver is asked. `sample.toml` says it in the operator's words."""

    interval_s: Seconds = 1.0
    retry_s: Seconds = 60.0


class NvmlCollector:
    """A driver that is absent, comes later, breaks or loses a GPU is an ordinary state here."""

    Config = NvmlConfig

    def __init__(
        self,
        config: NvmlConfig,
        mono_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._mono_s = mono_s
        self._wall_s = wall_s
        self._driver: Driver | None = None
        self._closed: Error | None = None
        self._open_at_s = float("-inf")
        self._known: dict[str, Gpu] = {}
        self._wrong: dict[Hashable, Finding] = {}
        self._gone: dict[str, Error] = {}
        self._silent: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._episodes = Episodes()

    def supported(self) -> str | None:
        """Return why there is nothing to look at. A driver that is there but broken is not that."""
        self._open_when_due()
        if self._closed and self._closed.code in parse.ABSENT:
            return f"no NVIDIA driver here: {self._closed.text}"
        if self._driver and not self._driver.handles and not self._driver.nameless:
            return "the NVIDIA driver has no GPU"
        return None

    def collect(self) -> Iterable[Reading | Finding]:
        """Return the readings of every GPU, and what began or ended since the pass before."""
        self._open_when_due()
        now_s = self._wall_s()
        out: list[Reading | Finding] = []
        if self._driver:
            self._wrong = {}
            for handle in self._driver.handles:
                readings, findings = self._judge(handle.gpu, self._driver.look(handle), now_s)
                out += readings
                self._wrong |= {(f.name, f.component): f for f in findings}
        elif self._closed and (self._known or self._closed.code not in parse.ABSENT):
            # What was wrong with the GPUs before is not better for being out of sight.
            self._wrong["nvml.unusable"] = parse.unusable(self._closed, now_s)
        for uuid, error in self._gone.items():
            gpu = self._known[uuid]
            self._wrong["gpu.lost", gpu.component] = parse.lost(gpu, error, now_s)
            out += parse.status(gpu, "failed")
        out += [parse.left_out(g, self._dropped[g.uuid]) for g in self._known.values()]
        return out + self._episodes.update(self._wrong, now_s)

    def _judge(
        self, gpu: Gpu, answers: dict[str, parse.Answer], now_s: float
    ) -> tuple[list[Reading], list[Finding]]:
        errors = [a for a in answers.values() if isinstance(a, Error)]
        if errors and errors[0].code in parse.GONE:
            self._gone[gpu.uuid] = errors[0]
            return [], []
        self._gone.pop(gpu.uuid, None)
        silent = len(errors) == len(answers) and not parse.UNSUPPORTED & {e.code for e in errors}
        self._silent[gpu.uuid] = self._silent[gpu.uuid] + 1 if silent else 0
        readings = [parse.info(gpu), *parse.readings(gpu, answers, self._dropped)]
        findings: list[Finding] = []
        if wanted := parse.action(answers["recovery_action"]):
            findings.append(parse.recovery(gpu, wanted, now_s))
        if self._silent[gpu.uuid] >= _UNREADABLE_PASSES:
            passes = self._silent[gpu.uuid]
            findings.append(parse.unreadable(gpu, errors[0], passes, now_s))
        return readings + parse.status(gpu, "degraded" if findings else "ok"), findings

    def _open_when_due(self) -> None:
        """Open the library when it is closed, and anew while a GPU is gone, silent or not there."""
        well = self._driver and self._driver.handles and not self._gone
        if (well and not any(self._silent.values())) or self._mono_s() < self._open_at_s:
            return
        self._open_at_s = self._mono_s() + self._config.retry_s
        if self._driver:
            self._driver.close()
        self._driver, self._closed = None, None
        try:
            self._driver = Driver()
        except DriverError as exc:
            self._closed = exc.error
            return
        self._take_roll(self._driver)

    def _take_roll(self, driver: Driver) -> None:
        here = {handle.gpu.uuid: handle.gpu for handle in driver.handles}
        self._known = {u: g for u, g in self._known.items() if g.named} | here
        self._gone = {u: e for u, e in self._gone.items() if u in self._known}
        missing = self._known.keys() - here.keys()
        for uuid in missing:
            self._gone.setdefault(uuid, Error(parse.GPU_IS_LOST, "it is no longer in the list"))
        if not missing:
            # Lost before this agent started: all that is known of it is its place in the list.
            for index, error in driver.nameless.items():
                gpu = Gpu(uuid=f"{parse.NAMELESS}{index}", pci="unknown")
                self._known[gpu.uuid] = gpu
                self._gone[gpu.uuid] = error

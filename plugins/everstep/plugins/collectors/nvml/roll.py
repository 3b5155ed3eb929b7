"""Every GPU that was ever seen here, and what is known of it by now: pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from everstep.plugins.collectors.nvml import parse
from everstep.plugins.collectors.nvml.parse import GONE, UNSUPPORTED, Action, Error, Gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from everstep.plugins.collectors.nvml.parse import Answer, Status
    from everstep.sdk import Finding, Reading

_SILENT_LOOKS = 3


@dataclass(slots=True)
class Watched:
    """One GPU: `trouble` is why it answers nothing, for `silent` looks in a row."""

    gpu: Gpu
    trouble: Error | None = None
    silent: int = 0
    asked: Action | None = None
    left_out: int = 0

    @property
    def gone(self) -> bool:
        """Return whether the driver has given it up."""
        return self.trouble is not None and self.trouble.code in GONE

    def hear(self, answers: Mapping[str, Answer]) -> list[Reading]:
        """Take in what one look brought and return its readings."""
        self.trouble = parse.silence(answers)
        self.silent = self.silent + 1 if self.trouble else 0
        wanted = answers["recovery_action"]
        # Saying nothing takes nothing back.
        if not isinstance(wanted, Error) or wanted.code in UNSUPPORTED:
            self.asked = parse.action(wanted)
        if self.gone:
            return []
        readings, left_out = parse.readings(self.gpu, answers)
        self.left_out += left_out
        return [parse.info(self.gpu), *readings]

    def miss(self, error: Error) -> None:
        """Take in that it could not be opened, or is not in the driver's list."""
        self.trouble = error
        self.silent = _SILENT_LOOKS

    def findings(self, at_s: float) -> list[Finding]:
        """Return what is wrong with it."""
        wrong: list[Finding] = []
        if self.trouble and self.gone:
            wrong.append(parse.lost(self.gpu, self.trouble, at_s))
        elif self.trouble and self.silent >= _SILENT_LOOKS:
            wrong.append(parse.unreadable(self.gpu, self.trouble, at_s))
        if self.asked:
            wrong.append(parse.recovery(self.gpu, self.asked, at_s))
        return wrong

    def summary(self, at_s: float) -> list[Reading]:
        """Return its state and how many answers were left out."""
        state: Status = "failed" if self.gone else "degraded" if self.findings(at_s) else "ok"
        return [*parse.status(self.gpu, state), parse.left_out(self.gpu, self.left_out)]


def called(
    roll: Mapping[str, Watched], here: Iterable[Gpu], unopened: Mapping[int, Error]
) -> dict[str, Watched]:
    """Return the roll after the driver's list was read: `here` by name, `unopened` by index."""
    # Only a GPU with a name can be found again; a nameless one is told anew, or is over.
    new = {uuid: watched for uuid, watched in roll.items() if watched.gpu.named}
    present = {gpu.uuid: gpu for gpu in here}
    missing = new.keys() - present.keys()
    for uuid in missing:
        if not new[uuid].gone:
            new[uuid].miss(_why_missing(unopened.values()))
    for uuid, gpu in present.items():
        new.setdefault(uuid, Watched(gpu))
    if not missing:
        # Lost before this agent started: all that is known of it is its place in the list.
        for index, error in unopened.items():
            if error.code in GONE:
                gpu = Gpu(uuid=f"{parse.NAMELESS}{index}", pci="unknown")
                new[gpu.uuid] = Watched(gpu, error)
    return new


def _why_missing(unopened: Iterable[Error]) -> Error:
    errors = list(unopened)
    if errors and not any(error.code in GONE for error in errors):
        return errors[0]  # it may well be one of those: not known to be lost
    return Error(parse.GPU_IS_LOST, "it is no longer in the driver's list")

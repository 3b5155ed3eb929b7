"""What doctor looks at: one line a check, each with what it is for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from everstep.cli.api import Api
from everstep.sdk.config import ConfigError, ConfigFile

State = Literal["ok", "warn", "missing"]

DEADLINE_S = 15.0


@dataclass(frozen=True, slots=True)
class Patient:
    """The machine and the person, as far as they are not to be found by looking.

    `file` is the configuration, or why it cannot be read.
    """

    environ: Mapping[str, str]
    file: ConfigFile | ConfigError
    api: Api
    socket: Path | None
    root: bool
    coordinator_named: bool


class Found(NamedTuple):
    """What a check found. `broken` tells that something which is needed does not work."""

    state: State
    text: str
    advice: str = ""
    broken: bool = False


class Check(NamedTuple):
    """A thing to look at."""

    name: str
    purpose: str
    look: Callable[[Patient], Found]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of doctor's answer."""

    name: str
    state: State
    found: str
    purpose: str
    advice: str
    broken: bool


def diagnose(
    checks: list[Check], patient: Patient, *, deadline_s: float = DEADLINE_S
) -> Iterator[Diagnosis]:
    """Yield what each check finds; one that raises or hangs costs the others nothing."""
    for check in checks:
        found = _looked(check, patient, deadline_s)
        yield Diagnosis(
            check.name, found.state, found.text, check.purpose, found.advice, found.broken
        )


def _looked(check: Check, patient: Patient, deadline_s: float) -> Found:
    answer: queue.SimpleQueue[Found] = queue.SimpleQueue()

    def look() -> None:
        try:
            answer.put(check.look(patient))
        except Exception as exc:  # noqa: BLE001  a machine may surprise a check in any way
            answer.put(Found("missing", f"cannot be looked at: {type(exc).__name__}: {exc}"))

    # A daemon thread: what hangs in a driver must not hang the answer.
    threading.Thread(target=look, name=check.name, daemon=True).start()
    try:
        return answer.get(timeout=deadline_s)
    except queue.Empty:
        advice = "look at `dmesg` and at the load of this machine"
        return Found("missing", f"no answer within {deadline_s:g} s", advice, broken=True)

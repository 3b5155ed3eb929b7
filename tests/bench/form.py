"""The one form of every benchmark: progress on stderr, one JSON line last on stdout."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

QUIET = 0.1

Value = float | int | None


@dataclass
class Form:
    """What one benchmark found. A figure that could not be taken is None and has its `why`."""

    bench: str
    targets: Mapping[str, float]
    runs: int
    machine: str = ""
    figures: dict[str, Value] = field(default_factory=dict)
    peers: dict[str, dict[str, Value]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine = self.machine or machine()

    def put(self, name: str, value: float | None, why: str = "") -> None:
        """Set a figure; `why` says why there is none, or what to know about the one there is."""
        self.figures[name] = rounded(value)
        if why:
            self.why[name] = why
        elif value is None:
            raise ValueError(f"{name}: a figure that was not taken needs its reason")

    def put_peer(self, peer: str, name: str, value: float | None, why: str = "") -> None:
        """Set a peer's figure."""
        self.peers.setdefault(peer, {})[name] = rounded(value)
        if why:
            self.why[f"{peer}.{name}"] = why

    def line(self) -> str:
        """Return the JSON line."""
        return json.dumps(
            {
                "bench": self.bench,
                "figures": self.figures,
                "peers": self.peers,
                "targets": dict(self.targets),
                "runs": self.runs,
                "machine": self.machine,
                "why": self.why,
            },
            allow_nan=False,
        )

    def print(self) -> None:
        """Print the JSON line, the last on stdout."""
        print(self.line(), flush=True)


def options(description: str | None) -> argparse.ArgumentParser:
    """Return the options that every benchmark has; from now on SIGTERM ends it as Ctrl-C does."""
    # Else what it has started would go on without it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="under a minute: fewer runs and no peers"
    )
    return parser


def say(text: str) -> None:
    """Show progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def rounded(value: float | None) -> float | None:
    """Return the value with four digits that mean something.

    >>> rounded(0.123456), rounded(12345.6), rounded(3), rounded(None)
    (0.1235, 12346, 3, None)
    """
    if value is None or isinstance(value, int):
        return value
    if not math.isfinite(value):
        raise ValueError(f"{value} is no figure")
    if value == 0 or abs(value) >= 1000:
        return round(value)
    return round(value, 3 - math.floor(math.log10(abs(value))))


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of those that were taken, None when none was."""
    taken = [value for value in values if value is not None]
    return statistics.median(taken) if taken else None


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the value that this share of all does not exceed.

    >>> percentile([3.0, 1.0, 2.0], 0.99), percentile([], 0.5)
    (3.0, None)
    """
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


def machine() -> str:
    """Describe this machine, and how busy others keep it now: figures mean nothing without."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [
        f"{os.cpu_count()} cores",
        _processor(),
        f"{memory_gib:.0f} GiB",
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}",
        *(f"{name} {version}" for name in ("torch",) if (version := _version(name))),
        f"{busy_share(1.0):.0%} busy with other work before the start",
    ]
    return ", ".join(parts)


def busy_share(seconds: float) -> float:
    """Watch for so long and return the share of all cores' time that was not idle."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    total = sum(after) - sum(before)
    idle = after[3] + after[4] - before[3] - before[4]
    return 1 - idle / total if total else 0.0


def await_quiet(most_s: float) -> float:
    """Wait until others leave the cores alone, at most so long; return how busy they are then."""
    end_s = time.monotonic() + most_s
    while (share := busy_share(1.0)) > QUIET and time.monotonic() < end_s:
        pass
    return share


def _ticks() -> list[int]:
    line = Path("/proc/stat").read_text().split("\n", 1)[0]
    return [int(word) for word in line.split()[1:9]]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""

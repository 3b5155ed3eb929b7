"""What is put to the test: a class, what is written about it, and where."""

from __future__ import annotations

import inspect
import re
import time
import tomllib
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.sdk.door import KINDS, PROTOCOLS, Kind, load
from everstep.sdk.hooks import MOMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from everstep.wire.messages import Reading


@dataclass(frozen=True)
class Subject:
    """One plugin under test.

    `name` is None when it was given as a class and nobody said how its entry point is called.
    """

    cls: Any
    kind: Kind
    name: str | None
    folder: Path
    offers: Mapping[str, object]
    readings: Sequence[Reading] = ()
    complete: bool = False
    deadline_s: float | None = None

    def text(self, file: str) -> str | None:
        """Return a file of the plugin's folder, None when it is not there."""
        path = self.folder / file
        return path.read_text(encoding="utf-8") if path.is_file() else None

    @property
    def table(self) -> dict[str, object] | None:
        """Return the plugin's table of sample.toml, None when there is none."""
        try:
            tables = tomllib.loads(self.text("sample.toml") or "").get(self.kind, {})
        except tomllib.TOMLDecodeError:
            return None
        name = self.name or next(iter(tables), None)
        table = tables.get(name)
        return table if isinstance(table, dict) else None


@dataclass(frozen=True)
class Metric:
    """One row of the table under `## Metrics` of a README."""

    unit: str
    counter: bool
    attributes: frozenset[str] = field(default_factory=frozenset)


def subject(
    plugin: type | EntryPoint,
    *,
    kind: Kind | None,
    folder: Path | None,
    offers: Mapping[str, object],
) -> Subject:
    """Return what there is to test. Raises TypeError when it is no plugin of any kind."""
    if isinstance(plugin, EntryPoint):
        kind = _kind_of_group(plugin)
        cls: Any = load(kind, plugin)
        name: str | None = plugin.name
    else:
        cls, name = plugin, None
        kind = kind or _kind_of_class(cls)
    home = folder or Path(inspect.getfile(cls)).parent
    return Subject(cls, kind, name, home, {**stand_ins(kind), **offers})


def _kind_of_group(point: EntryPoint) -> Kind:
    for kind in KINDS:
        if point.group == f"everstep.{kind}":
            return kind
    groups = ", ".join(f"everstep.{kind}" for kind in KINDS)
    raise TypeError(f"entry point {point.name} is in group {point.group}; the groups are {groups}")


def _kind_of_class(cls: type) -> Kind:
    fits: list[Kind] = [kind for kind, protocol in PROTOCOLS.items() if issubclass(cls, protocol)]
    if not fits and any(callable(getattr(cls, moment, None)) for moment in MOMENTS):
        fits = ["hooks"]
    if len(fits) != 1:
        found = " and ".join(fits) or "none of them"
        raise TypeError(
            f"{cls.__name__} should have one of collect(), detect(), act(), notify() or a moment "
            f"of training ({', '.join(MOMENTS)}); found: {found}; name its kind with kind="
        )
    return fits[0]


def stand_ins(kind: Kind) -> dict[str, object]:
    """Return what a constructor of this kind may ask for, each with nothing behind it."""
    if kind in ("collectors", "detectors"):
        return {"clock": time.time, "pages": list}
    if kind == "hooks":
        return {
            "report": lambda finding: None,  # noqa: ARG005  the name is part of the interface
            "page": _Idle(),
            "snapshots": _Idle(),
            "clock": time.time,
        }
    return {}


class _Idle:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_args, **_named: None


def section(readme: str, heading: str) -> str:
    """Return what stands under a heading of the second level."""
    found = re.search(rf"^## {heading}\s*$(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def metrics(readme: str) -> dict[str, Metric]:
    """Return the rows under `## Metrics`: name, unit, kind and attributes, in that order."""
    return {
        name: Metric(unit, what == "counter", frozenset(re.findall(r"`([^`]+)`", attributes)))
        for name, unit, what, attributes in (
            row[:4] for row in _rows(section(readme, "Metrics")) if len(row) >= 4
        )
    }


def findings(readme: str) -> set[str]:
    """Return the names in the first column under `## Findings`."""
    return {row[0] for row in _rows(section(readme, "Findings"))}


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.lstrip().startswith("| `"):
            # Only what is read as a name or a unit loses its ticks: attributes are told by theirs.
            yield [cell.strip("`") if n < 2 else cell for n, cell in enumerate(cells)]

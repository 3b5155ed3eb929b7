"""Every mistake in a configuration file, found as the parts that read it would find it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from everstep.agent import config as agent
from everstep.coordinator import config as coordinator
from everstep.sdk import door
from everstep.sdk.config import ConfigError, ConfigFile
from everstep.sdk.errors import EverstepError
from everstep.trainer.config import TrainerConfig

PARTS = ("agent", "coordinator", "trainer")


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong; `message` says file, table, key and what is allowed."""

    table: str | None
    key: str | None
    message: str


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of looking at a file. `notes` tell what could not be looked at, and why."""

    file: str | None
    errors: list[Mistake] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Table(NamedTuple):
    """A table by its dotted name, and what reads such a table: it raises ConfigError."""

    name: str
    content: Any
    read: Callable[[Any], None]


class _NotCheckedError(EverstepError):
    """The part that reads the table is not here, or it may not look."""


def check(file: ConfigFile, environ: Mapping[str, str]) -> Checked:
    """Look at every table of a file."""
    checked = Checked(str(file.path) if file.path else None)
    for table in _tables(file, environ):
        try:
            for exc in mistakes(table.content, table.read):
                checked.errors.append(Mistake(table.name, exc.key, str(exc)))
        except _NotCheckedError as exc:
            checked.notes.append(f"{file.where}: [{table.name}] was not checked: {exc}")
    return checked


def mistakes(content: Any, read: Callable[[Any], None]) -> Iterator[ConfigError]:
    """Yield everything that `read` has against a table, not only what it stops at.

    A key that is wrong is taken out and the rest read again. What is then wrong with no one key
    may come from the taking out, and is left for the next check.
    """
    rest = copy.deepcopy(content)
    taken_out = False
    while True:
        try:
            read(rest)
        except ConfigError as exc:
            if exc.key is not None or not taken_out:
                yield exc
            taken_out = exc.key is not None and _take_out(rest, exc.key)
            if not taken_out:
                return
        else:
            return


def _tables(file: ConfigFile, environ: Mapping[str, str]) -> Iterator[Table]:
    for name, content in file.tables.items():
        if name in PARTS:
            yield Table(name, content, partial(_read_part, file, environ, name))
        elif name not in door.KINDS:
            yield Table(name, content, partial(_refuse, file, name))
        elif isinstance(content, dict):
            for plugin, table in content.items():
                read = partial(_read_plugin, file, name, plugin)
                yield Table(f"{name}.{plugin}", table, read)
        else:
            yield Table(name, content, partial(_read_kind, file, name))


def _read_part(file: ConfigFile, environ: Mapping[str, str], name: str, content: Any) -> None:
    one = replace(file, tables={name: content})
    try:
        if name == "agent":
            agent.settle(one, agent.Overrides(), environ)
        elif name == "coordinator":
            coordinator.settle(one, environ, root=os.geteuid() == 0)
        else:
            one.section(name, TrainerConfig)
    except ConfigError as exc:
        if isinstance(exc.__cause__, PermissionError):
            raise _NotCheckedError(f"{exc.__cause__}; check as the user who runs it") from exc
        raise


def _read_kind(file: ConfigFile, kind: door.Kind, content: Any) -> None:
    door.check(replace(file, tables={kind: content}), kind)


def _read_plugin(file: ConfigFile, kind: door.Kind, name: str, content: Any) -> None:
    one = replace(file, tables={kind: {name: content}})
    door.check(one, kind)
    enabled, _ = door.table(one, kind, name)
    if enabled:
        door.configure(one, kind, name, _load(kind, name))


def _load(kind: door.Kind, name: str) -> Any:
    try:
        return door.load(kind, door.installed(kind)[name])
    except ModuleNotFoundError as exc:
        raise _NotCheckedError(f"{exc.name} is not installed here") from exc
    except (Exception, SystemExit) as exc:  # a stranger's import may raise anything
        raise _NotCheckedError(f"it cannot be imported: {type(exc).__name__}: {exc}") from exc


def _refuse(file: ConfigFile, name: str, content: Any) -> None:
    one = replace(file, tables={name: content})
    one.check_names("", (*PARTS, *door.KINDS), what="table")


def _take_out(table: Any, key: str) -> bool:
    *way, last = (part.partition("[")[0] for part in key.split("."))
    for part in way:
        table = table.get(part) if isinstance(table, dict) else None
    if not isinstance(table, dict) or last not in table:
        return False
    del table[last]
    return True

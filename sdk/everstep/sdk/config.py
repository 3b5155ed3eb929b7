"""One TOML file for everything; every table is typed, and every mistake says where it is."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from everstep.sdk.errors import EverstepError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

T = TypeVar("T", bound=msgspec.Struct)

DEFAULT_PATHS = (Path("/etc/everstep/everstep.toml"),)


class ConfigError(EverstepError):
    """The configuration cannot be used: file, table, key and what is allowed.

    `key` is the key of the table that is to blame, dotted, None where it is not one alone.
    """

    def __init__(self, text: str, *, key: str | None = None) -> None:
        super().__init__(text)
        self.key = key


class _NoFileError(ConfigError):
    """Only a file that somebody named has to exist."""


@dataclass(frozen=True)
class ConfigFile:
    """The parsed file. Tables are read by the part they belong to, each with its own type."""

    path: Path | None = None
    tables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None) -> ConfigFile:
        """Read a file; None means the first of `DEFAULT_PATHS` that exists, else all defaults.

        Raises ConfigError when it cannot be read or is not TOML.
        """
        if path is not None:
            return cls(path, _read(path))
        for usual in DEFAULT_PATHS:
            try:
                return cls(usual, _read(usual))
            except _NoFileError:
                continue
        return cls()

    @property
    def where(self) -> str:
        """The file's name for messages."""
        return str(self.path) if self.path else "built-in defaults"

    def section(self, table: str, type_: type[T]) -> T:
        """Return the table, e.g. `agent` or `collectors.host`, as its type.

        Raises ConfigError that names file, table, key and what is allowed.
        """
        raw: Any = self.tables
        for part in table.split("."):
            raw = raw.get(part, {}) if isinstance(raw, dict) else raw
        if not isinstance(raw, dict):
            raise ConfigError(f"{self.where}: [{table}] must be a table, not {raw!r}")
        return convert(raw, type_, where=f"{self.where}: [{table}]")

    def check_names(self, table: str, known: Iterable[str], *, what: str) -> None:
        """Raise ConfigError when `table` has a sub-table that is not in `known`."""
        raw = self.tables.get(table, {}) if table else self.tables
        if not isinstance(raw, dict):
            raise ConfigError(f"{self.where}: [{table}] must be a table, not {raw!r}")
        known = sorted(known)
        for name in raw:
            if name not in known:
                dotted = f"{table}.{name}" if table else name
                raise ConfigError(
                    f"{self.where}: [{dotted}]: unknown {what} {name!r}{_hint(name, known)}; "
                    f"known: {', '.join(known) or 'none'}"
                )


def convert(raw: Mapping[str, Any], type_: type[T], *, where: str) -> T:
    """Return `raw` as `type_`, refusing keys that it does not have. Raises ConfigError."""
    _refuse_unknown_keys(raw, type_, where)
    try:
        return msgspec.convert(raw, type_)
    except msgspec.ValidationError as exc:
        found = re.search(r"`\$\.([\w.\[\]-]+)`", str(exc))
        text = re.sub(r" - at `\$.*`$", "", str(exc))
        at = f" key {found[1]!r}:" if found else ""
        allowed = _choices(type_, found[1]) if found else ""
        raise ConfigError(f"{where}:{at} {text}{allowed}", key=found and found[1]) from exc


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise _NoFileError(f"{path}: there is no such file") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path}: not valid TOML: {exc}") from exc


def _refuse_unknown_keys(
    raw: Mapping[str, Any], type_: type[msgspec.Struct], where: str, prefix: str = ""
) -> None:
    known = type_.__struct_encode_fields__
    for key in raw:
        if key not in known:
            raise ConfigError(
                f"{where}: unknown key {prefix + key!r}{_hint(key, known)}; known keys: "
                f"{', '.join(known) or 'none'}",
                key=prefix + key,
            )
    for one in msgspec.structs.fields(type_):
        inner = raw.get(one.encode_name)
        for nested in (one.type, *get_args(one.type)):
            if isinstance(inner, dict) and isinstance(nested, type(msgspec.Struct)):
                _refuse_unknown_keys(inner, nested, where, f"{prefix}{one.encode_name}.")


def _choices(type_: type[msgspec.Struct], key: str) -> str:
    # msgspec names the value that it refuses but not the ones that it would take.
    hint = get_type_hints(type_).get(key)
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Literal:
            return f"; allowed: {', '.join(map(repr, get_args(part)))}"
    return ""


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
